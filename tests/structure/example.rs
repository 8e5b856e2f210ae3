//! The worked example in CONTRIBUTING.md: each of its lines is in the file that it names.

use super::files::root;

#[test]
fn worked_example_matches_the_code() {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let blocks = text.split("```diff\n").skip(1).filter_map(|rest| rest.split("```").next());
    let (mut file, mut lines) = (None, 0);
    for line in blocks.flat_map(str::lines) {
        if let Some(path) = line.strip_prefix("+++ ") {
            file = Some((path, std::fs::read_to_string(root().join(path)).unwrap()));
        } else if let (Some((path, code)), Some(line)) = (&file, line.strip_prefix('+')) {
            assert!(code.lines().any(|l| l == line), "{path} has no line {line:?}");
            lines += 1;
        } else {
            panic!("neither a file nor an added line: {line:?}");
        }
    }
    assert!(lines > 10, "{lines}");
}
