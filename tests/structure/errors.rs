//! Errors of the machine, the back ends and the control crate have types: no function there returns
//! a `String` as its error.

use std::fs;

use syn::visit::{self, Visit};
use syn::{GenericArgument, ImplItemType, PathArguments, PathSegment, Type};

use super::files::{files, relative, root};

const FOLDERS: [&str; 3] = ["vmm/machine/src", "vmm/backends/src", "vmm/control/src"];

/// Counts the places where the error of a `Result` or of a `FromStr` is a `String`.
#[derive(Default)]
struct StringErrors(usize);

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

fn is_string(of: &Type) -> bool {
    matches!(of, Type::Path(of) if of.path.is_ident("String"))
}

fn string_errors(text: &str) -> usize {
    let mut errors = StringErrors::default();
    errors.visit_file(&syn::parse_file(text).unwrap());
    errors.0
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
