//! Errors have types. No function of the machine, the backends and the control crate returns a
//! `String` as its error. Nowhere in the product is a type another name of `String`, no error keeps
//! a `String` as its reason (`why`, `reason`, or without a name), which would drop the source, and
//! each `cause` is marked as the source, so that [`std::error::Error::source`] returns it.

use std::fs;

use syn::visit::{self, Visit};
use syn::{
    Attribute, Field, Fields, GenericArgument, Ident, ImplItemType, ItemEnum, ItemStruct, ItemType,
    PathArguments, PathSegment, Type,
};

use super::files::{files, relative, root};

const FOLDERS: [&str; 3] = ["vmm/machine/src", "vmm/backends/src", "vmm/control/src"];

/// The crates whose errors keep their sources.
const PRODUCT: [&str; 4] = ["checkpoint", "dirty-tracker", "migrate", "vmm"];

/// How the names of types end that say why something failed.
const ENDINGS: [&str; 8] =
    ["Error", "Fault", "Violation", "Cause", "Lack", "Defect", "Misfit", "Refusal"];

/// Files of faults whose texts are Firecracker's own words, which clients compare: a text is made
/// where the reason is known, and nothing reads it but the client.
const FIRECRACKER: [&str; 2] =
    ["vmm/cli/src/firecracker/fault.rs", "vmm/control/src/firecracker/fault.rs"];

/// The texts that an error may keep, and what each one is.
const TEXTS: [(&str, &str); 14] = [
    ("AppError::NoGuest", "what the guest's arrival waits for, as progress reports it"),
    ("Cause::ConnectionRefused", "what the refused peer was sent, as progress reports it"),
    ("ClientError::Fault", "the server's answer"),
    ("FrameError::HandlerLost", "the end of another process, which may be reported many times"),
    ("JobError::DriveExchanged", "the name of a drive"),
    ("MemoryError::Lost", "the loss of a page, which is reported to each who waits for it"),
    ("OfferError::Refused", "the answer of another process"),
    ("SnapshotError::LiveDrive", "the name of a drive"),
    ("StepError::NotMigrated", "the server's answer"),
    ("StepError::NotStored", "the server's answer"),
    ("SupervisorError::Lost", "the loss of a page, which is reported to each who asks"),
    ("UpgradeError::HandOver", "the outcome of a job, as its progress reports it"),
    ("WireError::Aborted", "the peer's text"),
    ("WireError::Refused", "the peer's text"),
];

/// Counts the places where the error of a `Result` or of a `FromStr` is a `String`.
#[derive(Default)]
struct StringErrors(usize);

/// Collects the types that are another name of `String`, and the errors with a `String` as their
/// reason or with a `cause` that is not marked as their source.
#[derive(Default)]
struct StringReasons(Vec<String>);

impl StringReasons {
    /// Checks the fields of the type `of`, or of its variant `name`.
    fn add_fields(&mut self, of: &Ident, name: &str, attributes: &[Attribute], fields: &Fields) {
        let is_error = attributes.iter().any(derives_error);
        let is_unmarked = |field: &Field| {
            let marks = |a: &Attribute| a.path().is_ident("source") || a.path().is_ident("from");
            field.ident.as_ref().is_some_and(|name| name == "cause")
                && !is_string(&field.ty)
                && !field.attrs.iter().any(marks)
        };
        if is_error && fields.iter().any(is_unmarked) {
            self.0.push(name.to_owned());
        }
        let is_reason = |field: &Field| {
            let is_named_so = |name: &Ident| name == "why" || name == "reason";
            field.ident.as_ref().is_none_or(is_named_so) && is_string(&field.ty)
        };
        let of = of.to_string();
        if ENDINGS.iter().any(|end| of.ends_with(end)) && fields.iter().any(is_reason) {
            self.0.push(name.to_owned());
        }
    }
}

impl<'ast> Visit<'ast> for StringReasons {
    fn visit_item_type(&mut self, item: &'ast ItemType) {
        if is_string(&item.ty) {
            self.0.push(item.ident.to_string());
        }
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        for variant in &item.variants {
            let name = format!("{}::{}", item.ident, variant.ident);
            self.add_fields(&item.ident, &name, &item.attrs, &variant.fields);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.add_fields(&item.ident, &item.ident.to_string(), &item.attrs, &item.fields);
    }
}

impl<'ast> Visit<'ast> for StringErrors {
    fn visit_path_segment(&mut self, segment: &'ast PathSegment) {
        if segment.ident == "Result"
            && let PathArguments::AngleBracketed(of) = &segment.arguments
            && let Some(GenericArgument::Type(error)) = of.args.iter().nth(1)
            && is_string(error)
        {
            self.0 += 1;
        }
        visit::visit_path_segment(self, segment);
    }

    fn visit_impl_item_type(&mut self, item: &'ast ImplItemType) {
        if item.ident == "Err" && is_string(&item.ty) {
            self.0 += 1;
        }
        visit::visit_impl_item_type(self, item);
    }
}

/// Returns whether an attribute derives `thiserror::Error`.
fn derives_error(attribute: &Attribute) -> bool {
    let mut derives = false;
    if attribute.path().is_ident("derive") {
        let _ = attribute.parse_nested_meta(|derived| {
            derives |= derived.path.segments.last().is_some_and(|last| last.ident == "Error");
            Ok(())
        });
    }
    derives
}

fn is_string(of: &Type) -> bool {
    matches!(of, Type::Path(of) if of.path.is_ident("String"))
}

fn string_errors(text: &str) -> usize {
    let mut errors = StringErrors::default();
    errors.visit_file(&syn::parse_file(text).unwrap());
    errors.0
}

fn string_reasons(text: &str) -> Vec<String> {
    let mut reasons = StringReasons::default();
    reasons.visit_file(&syn::parse_file(text).unwrap());
    reasons.0
}

#[test]
fn errors_keep_their_sources() {
    let files: Vec<_> = PRODUCT.iter().flat_map(|dir| files(&root().join(dir), &["rs"])).collect();
    assert!(files.len() > 300, "only {} files were found", files.len());
    let mut texts = Vec::new();
    for file in files {
        let name = relative(&file);
        if FIRECRACKER.contains(&name.as_str()) {
            continue;
        }
        let mut found = string_reasons(&fs::read_to_string(&file).unwrap());
        let is_text = |of: &String| TEXTS.iter().any(|(text, _)| text == of);
        texts.extend(found.extract_if(.., |of| is_text(of)));
        assert!(found.is_empty(), "{name}: {found:?}: use `#[source] cause` with its type");
    }
    texts.sort();
    assert_eq!(texts, TEXTS.map(|(text, _)| text), "each text of the list is in the code");
}

#[test]
fn string_reasons_are_found() {
    for (text, found) in [
        ("type StepError = String;", &["StepError"][..]),
        ("enum AError { B { what: u8, why: String } }", &["AError::B"]),
        ("enum Cause { B(u8), C { reason: String } }", &["Cause::C"]),
        ("enum AFault { B(u8, String), C { name: String } }", &["AFault::B"]),
        ("struct AViolation(pub String);", &["AViolation"]),
        ("mod m { pub struct AError { pub why: String } }", &["AError"]),
        ("enum AError { B { why: &'static str, what: String } }", &[]),
        ("#[derive(thiserror::Error)] enum A { B { cause: u8 } }", &["A::B"]),
        ("#[derive(Debug, Error)] struct A { #[source] cause: u8 }", &[]),
        ("#[derive(Debug)] struct Row { cause: u8 }", &[]),
        ("struct Row { why: String } struct Id(String); type Names = Vec<String>;", &[]),
    ] {
        assert_eq!(string_reasons(text), found, "{text}");
    }
}

#[test]
fn no_error_is_a_string() {
    let files: Vec<_> = FOLDERS.iter().flat_map(|dir| files(&root().join(dir), &["rs"])).collect();
    assert!(files.len() > 100, "only {} files were found", files.len());
    for file in files {
        let found = string_errors(&fs::read_to_string(&file).unwrap());
        assert_eq!(found, 0, "{}: Result<_, String>", relative(&file));
    }
}

#[test]
fn string_errors_are_found() {
    assert_eq!(
        string_errors("fn f() -> Result<Vec<u8>, String> { g::<Option<Result<(), String>>>() }"),
        2
    );
    assert_eq!(string_errors("impl FromStr for A { type Err = String; }"), 1);
    assert_eq!(
        string_errors("fn f() -> Result<String, Error> { let a: Option<String> = None; }"),
        0
    );
}
