//! Errors of the machine and of what controls it have types: no function there returns a sentence
//! as its error.

use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{GenericArgument, ImplItemType, PathArguments, PathSegment, Type};

const FOLDERS: [&str; 3] = ["vmm/machine/src", "vmm/backends/src", "vmm/control/src"];

/// Counts where the error of a `Result`, or of a `FromStr`, is a `String`.
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

fn sentences(text: &str) -> usize {
    let mut sentences = StringErrors::default();
    sentences.visit_file(&syn::parse_file(text).unwrap());
    sentences.0
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_error_is_a_bare_sentence() {
    let mut files = Vec::new();
    FOLDERS.iter().for_each(|folder| rust_files(&super::root().join(folder), &mut files));
    assert!(files.len() > 100, "only {} files were found", files.len());
    for file in files {
        let found = sentences(&fs::read_to_string(&file).unwrap());
        assert_eq!(found, 0, "{}: Result<_, String>", file.display());
    }
}

#[test]
fn string_errors_are_found() {
    assert_eq!(
        sentences("fn f() -> Result<Vec<u8>, String> { g::<Option<Result<(), String>>>() }"),
        2
    );
    assert_eq!(sentences("impl FromStr for A { type Err = String; }"), 1);
    assert_eq!(sentences("fn f() -> Result<String, Error> { let a: Option<String> = None; }"), 0);
}
