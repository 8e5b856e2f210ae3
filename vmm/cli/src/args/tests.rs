use clap::{Arg, Command, CommandFactory, Parser};

use super::{Cli, with_hint};

/// Returns every command, with the names of its parents before its own.
fn commands() -> Vec<(String, Command)> {
    let mut all = Vec::new();
    let mut left = vec![(String::new(), Cli::command())];
    left[0].1.build();
    while let Some((above, command)) = left.pop() {
        let name = format!("{above} {}", command.get_name()).trim_start().to_owned();
        let below = command.get_subcommands().filter(|below| below.get_name() != "help");
        left.extend(below.map(|below| (name.clone(), below.clone())));
        all.push((name, command));
    }
    assert!(all.len() > 20, "{}", all.len());
    all
}

fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| !arg.is_positional())
}

#[test]
fn every_option_has_a_heading() {
    for (name, command) in commands() {
        let without: Vec<_> =
            options(&command).filter(|o| o.get_help_heading().is_none()).collect();
        assert!(without.is_empty(), "{name}: {without:?}");
        let api = options(&command).find(|o| o.get_id() == "api_sock");
        assert!(api.is_none_or(|o| o.get_help_heading() == Some("API")), "{name}");
    }
}

#[test]
fn short_help_has_one_line_each() {
    for (name, command) in commands() {
        let help = command.clone().term_width(100).render_help().to_string();
        // A row begins with an option, an argument or a command. All other lines continue a row.
        let rest: Vec<&str> = help.lines().filter(|line| line.starts_with("          ")).collect();
        let rest: Vec<&&str> =
            rest.iter().filter(|line| !line.trim_start().starts_with('-')).collect();
        assert!(rest.is_empty(), "{name} -h: {rest:#?}");
        let wide: Vec<&str> = help.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(wide.is_empty(), "{name} -h: {wide:#?}");
        for option in options(&command).filter(|option| !option.is_hide_set()) {
            let short = option.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(!short.is_empty() && !short.ends_with('.'), "{name}: {option}: {short}");
        }
    }
}

#[test]
fn examples_are_command_lines() {
    for (name, command) in commands() {
        let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples: Vec<&str> = examples.lines().skip(1).map(str::trim).collect();
        assert!(!examples.is_empty(), "{name} has no example");
        for example in examples.into_iter().filter(|example| !example.contains("COMMAND")) {
            let read = Cli::try_parse_from(example.split(' '));
            assert!(read.is_ok(), "{name}: {example}: {}", read.err().unwrap());
            assert!(name == "driftline" || example.starts_with(&name), "{name}: {example}");
        }
    }
}

#[test]
fn wrong_names_have_a_hint() {
    let message = |line: &str| {
        let e = Cli::try_parse_from(line.split(' ')).err().unwrap();
        with_hint(e).to_string()
    };
    for (line, hint) in [
        ("driftline ps", "similar subcommands exist: 'info', 'store ls'"),
        ("driftline rnu", "similar subcommand exists: 'run'"),
        ("driftline start", "similar subcommand exists: 'run'"),
        ("driftline snapshot", "'checkpoint'"),
        ("driftline migrate", "'send-migration', 'receive-migration'"),
        ("driftline run --memory 1G", "a similar argument exists: '--mem'"),
        ("driftline run --drive a", "a similar argument exists: '--disk'"),
        ("driftline info --socket a", "a similar argument exists: '--api-sock'"),
    ] {
        assert!(message(line).contains(hint), "{line}: {}", message(line));
    }
    assert!(!message("driftline xyzzy").contains("tip:"), "{}", message("driftline xyzzy"));
}

#[test]
fn hints_name_what_exists() {
    let all = commands();
    let named = |name: &str| all.iter().any(|(known, _)| *known == format!("driftline {name}"));
    for (wrong, meant) in super::hints::COMMANDS {
        assert!(meant.iter().all(|name| named(name)), "{meant:?}");
        assert!(!wrong.iter().any(|name| named(name)), "{wrong:?}");
    }
    for (_, meant) in super::hints::OPTIONS {
        let long = meant.trim_start_matches("--");
        let known = |c: &Command| options(c).any(|option| option.get_long() == Some(long));
        assert!(all.iter().any(|(_, command)| known(command)), "{meant}");
    }
}
