//! What only some files know: how KVM's device is opened, the payload crate, and the sockets of
//! migrations.
//!
//! The payload is one guest of many. In the command line only `--guest` and the demo know it.
//! `crates` lists the crates that do.

use std::fs;

use syn::visit::{self, Visit};
use syn::{Expr, ExprCall, ExprLit, ExprMethodCall, Ident, Lit};

use super::files::{files, relative, root};

const KVM_DEVICE: &str = "/dev/kvm";
/// The folder whose crate opens KVM's device.
const KVM_FOLDER: &str = "vmm/machine/";
/// The sources of the product outside [`KVM_FOLDER`].
const OTHERS: [&str; 7] = [
    "checkpoint",
    "dirty-tracker/src",
    "migrate",
    "vmm/backends",
    "vmm/control",
    "vmm/compare",
    "vmm/cli/src",
];

/// The sources of the command line that know the payload crate.
const KNOW_THE_PAYLOAD: [&str; 2] = ["vmm/cli/src/values.rs", "vmm/cli/src/demo/"];

/// Whether a file opens KVM's device, or names the payload crate.
#[derive(Default, PartialEq, Eq, Debug)]
struct Knowledge {
    kvm: bool,
    payload: bool,
}

impl Knowledge {
    /// Reads the call of a function or method `name`.
    fn read_call<'a>(&mut self, name: &Ident, mut arguments: impl Iterator<Item = &'a Expr>) {
        self.kvm |= name == "open" && arguments.any(is_kvm_device);
    }
}

/// Returns whether an argument is the path of KVM's device.
fn is_kvm_device(argument: &Expr) -> bool {
    match argument {
        Expr::Lit(ExprLit { lit: Lit::Str(lit), .. }) => lit.value() == KVM_DEVICE,
        Expr::Lit(ExprLit { lit: Lit::CStr(lit), .. }) => {
            lit.value().as_bytes() == KVM_DEVICE.as_bytes()
        }
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Knowledge {
    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        if let Expr::Path(called) = &*call.func
            && let Some(name) = called.path.segments.last()
        {
            self.read_call(&name.ident, call.args.iter());
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.read_call(&call.method, call.args.iter());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_ident(&mut self, ident: &'ast Ident) {
        self.payload |= ident == "driftline_images";
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        // syn does not parse a macro's arguments.
        let tokens = called.tokens.to_string();
        self.payload |= tokens.contains("driftline_images");
        visit::visit_macro(self, called);
    }
}

fn knowledge(text: &str) -> Knowledge {
    let mut knowledge = Knowledge::default();
    knowledge.visit_file(&syn::parse_file(text).unwrap());
    knowledge
}

/// Returns the files of `folders`, relative to the root, whose knowledge `is_wanted`.
fn knowing(folders: &[&str], is_wanted: fn(&Knowledge) -> bool) -> Vec<String> {
    let files: Vec<_> = folders.iter().flat_map(|dir| files(&root().join(dir), &["rs"])).collect();
    assert!(files.len() > 30, "only {} files were found", files.len());
    let known =
        |path: &&std::path::PathBuf| is_wanted(&knowledge(&fs::read_to_string(path).unwrap()));
    files.iter().filter(known).map(|path| relative(path)).collect()
}

#[test]
fn only_the_machine_opens_the_kvm_device() {
    assert_eq!(knowing(&OTHERS, |k| k.kvm), [""; 0], "only {KVM_FOLDER} opens /dev/kvm");
}

#[test]
fn only_demo_and_guest_option_know_the_payload() {
    let known = knowing(&["vmm/cli/src"], |k| k.payload);
    let (allowed, others): (Vec<_>, Vec<_>) =
        known.iter().partition(|path| KNOW_THE_PAYLOAD.iter().any(|at| path.starts_with(at)));
    assert!(others.is_empty(), "they name driftline_images: {others:?}");
    assert!(allowed.len() > 1, "{allowed:?}");
}

#[test]
fn knowledge_is_found_however_it_is_written() {
    let of = |kvm, payload| Knowledge { kvm, payload };
    for (text, expected) in [
        ("use driftline_images::PayloadSpec;", of(false, true)),
        ("fn f() -> driftline_images::A { g!(driftline_images::B) }", of(false, true)),
        ("fn f() { assert!(driftline_images::A); }", of(false, true)),
        (r#"fn f() { File::open("/dev/kvm"); }"#, of(true, false)),
        (r#"fn f() { options().read(true).open(c"/dev/kvm")?; }"#, of(true, false)),
        (
            r#"fn f() { show("/dev/kvm"); open("/dev/null"); } // driftline_images"#,
            of(false, false),
        ),
    ] {
        assert_eq!(knowledge(text), expected, "{text}");
    }
}

#[test]
fn only_the_transport_names_tcp_sockets() {
    let sources = files(&root().join("migrate/src"), &["rs"]);
    assert!(sources.len() > 80, "only {} files were found", sources.len());
    let names = |text: &str| ["TcpStream", "TcpListener"].iter().any(|name| text.contains(name));
    let others = sources.iter().filter(|path| names(&fs::read_to_string(path).unwrap()));
    let wrong: Vec<String> = others.map(|path| relative(path)).collect();
    assert!(wrong.iter().all(|path| path.starts_with("migrate/src/transport/")), "{wrong:?}");
}
