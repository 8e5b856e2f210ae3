//! The words of paths that the parser of Firecracker's operations compares with are those of the
//! document, for each method.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Arm, BinOp, Expr, ExprBinary, ExprCall, ExprMatch, ItemFn, Lit, Pat, PatLit};
use tests::ApiDocument;

use super::model::{parse, root};

/// The parser.
const PARSER: &str = "vmm/control/src/firecracker/parse.rs";
/// Its function whose `match` of the method names a function for each.
const ENTRY: &str = "parse";

/// The functions of the parser, by name.
struct ParserSource(BTreeMap<String, ItemFn>);

impl ParserSource {
    fn read() -> Self {
        let functions =
            parse(&root().join(PARSER)).items.into_iter().filter_map(|item| match item {
                syn::Item::Fn(item) => Some((item.sig.ident.to_string(), item)),
                _ => None,
            });
        Self(functions.collect())
    }

    /// Returns the words of each method.
    fn words(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut arms = MethodArms::default();
        arms.visit_item_fn(&self.0[ENTRY]);
        let words = arms.0.into_iter().map(|(method, arm)| {
            let mut reader = WordReader { source: self, read: BTreeSet::new(), words: arm.words };
            arm.calls.iter().for_each(|function| reader.read(function));
            (method, reader.words)
        });
        words.collect()
    }
}

/// What the parser does for a method.
#[derive(Default)]
struct MethodArm {
    /// Functions that it calls.
    calls: Vec<String>,
    words: BTreeSet<String>,
}

/// The arms of the `match` of the method.
#[derive(Default)]
struct MethodArms(BTreeMap<String, MethodArm>);

impl<'ast> Visit<'ast> for MethodArms {
    fn visit_expr_match(&mut self, item: &'ast ExprMatch) {
        let is_method = matches!(&*item.expr, Expr::Path(path) if path.path.is_ident("method"));
        assert!(is_method, "{ENTRY} matches something else than the method");
        for Arm { pat, body, .. } in &item.arms {
            let mut literals = Literals::default();
            literals.visit_pat(pat);
            let mut called = Literals::default();
            called.visit_expr(body);
            for method in literals.texts {
                let arm = MethodArm { calls: called.calls.clone(), words: BTreeSet::new() };
                assert!(self.0.insert(method.clone(), arm).is_none(), "{method} has two arms");
            }
        }
    }
}

/// Collects texts that are compared with, and functions that are called.
#[derive(Default)]
struct Literals {
    texts: BTreeSet<String>,
    calls: Vec<String>,
}

impl<'ast> Visit<'ast> for Literals {
    fn visit_pat(&mut self, pattern: &'ast Pat) {
        if let Pat::Lit(PatLit { lit: Lit::Str(text), .. }) = pattern {
            self.texts.insert(text.value());
        }
        visit::visit_pat(self, pattern);
    }

    fn visit_expr_binary(&mut self, binary: &'ast ExprBinary) {
        if matches!(binary.op, BinOp::Eq(_) | BinOp::Ne(_)) {
            let mut operands = StringOperands(&mut self.texts);
            operands.visit_expr(&binary.left);
            operands.visit_expr(&binary.right);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        if let Expr::Path(path) = &*call.func
            && let Some(name) = path.path.get_ident()
        {
            self.calls.push(name.to_string());
        }
        visit::visit_expr_call(self, call);
    }
}

/// Collects the texts in an operand of a comparison.
struct StringOperands<'t>(&'t mut BTreeSet<String>);

impl<'ast> Visit<'ast> for StringOperands<'_> {
    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.0.insert(text.value());
    }
}

/// Collects the words of functions, and of those that they call.
struct WordReader<'s> {
    source: &'s ParserSource,
    read: BTreeSet<String>,
    words: BTreeSet<String>,
}

impl WordReader<'_> {
    fn read(&mut self, name: &str) {
        let Some(function) = self.source.0.get(name) else { return };
        if self.read.insert(name.to_owned()) {
            let mut literals = Literals::default();
            literals.visit_item_fn(function);
            self.words.extend(literals.texts);
            literals.calls.iter().for_each(|call| self.read(call));
        }
    }
}

#[test]
fn words_of_paths_equal_those_parsed() {
    let mut documented: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for operation in ApiDocument::read().operations().filter(|o| o.has_tag("firecracker")) {
        let words = documented.entry(operation.method()).or_default();
        words.extend(operation.path().split('/').filter(|w| *w != "{id}").map(str::to_owned));
    }
    let mut parsed = ParserSource::read().words();
    // A path begins with an empty word, which only `/` needs.
    parsed.values_mut().for_each(|words| _ = words.insert(String::new()));
    assert_eq!(documented, parsed);
    assert!(parsed["PUT"].contains("load"), "{parsed:?}");
}
