//! Tests of Firecracker's command line.

use super::*;

fn parse_line(line: &str) -> Result<FirecrackerCommand, FirecrackerFault> {
    parse(line.split(' ').filter(|word| !word.is_empty()).map(OsString::from).collect())
}

fn args(line: &str) -> FirecrackerArgs {
    match parse_line(line) {
        Ok(FirecrackerCommand::Serve(args)) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

fn fault(line: &str) -> ArgumentFault {
    match parse_line(line) {
        Err(FirecrackerFault::ParseArguments(fault)) => fault,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn absent_arguments_have_firecrackers_defaults() {
    let defaults = FirecrackerArgs {
        api_sock: "/run/firecracker.socket".into(),
        no_api: false,
        id: "anonymous-instance".to_owned(),
        config_file: None,
        metadata: None,
        log: LoggerConfig::default(),
        metrics_path: None,
        boot_timer: false,
        no_seccomp: false,
        start_time_us: None,
        start_time_cpu_us: None,
        parent_cpu_time_us: None,
        payload_limit: 51200,
        mmds_limit: 51200,
    };
    assert_eq!(args(""), defaults);
    assert_eq!(args("--"), defaults);
    let given = args("--http-api-max-payload-size 7 --id a-1 --api-sock /tmp/s");
    let (api_sock, id) = ("/tmp/s".into(), "a-1".to_owned());
    assert_eq!(
        given,
        FirecrackerArgs { api_sock, id, payload_limit: 7, mmds_limit: 7, ..defaults }
    );
}

#[test]
fn values_of_all_arguments_are_read() {
    let line = "--config-file c --metadata m --log-path l --level Warning --module a::b \
                --metrics-path p --start-time-us 1 --start-time-cpu-us 2 --parent-cpu-time-us 3 \
                --mmds-size-limit 4 --id i --no-api --boot-timer --no-seccomp --show-level \
                --show-log-origin";
    let line: Vec<_> = line.split(' ').map(str::to_owned).collect();
    let mut given = given_arguments(&line).unwrap();
    let expected = FirecrackerArgs {
        api_sock: "/run/firecracker.socket".into(),
        no_api: true,
        id: "i".to_owned(),
        config_file: Some("c".into()),
        metadata: Some("m".into()),
        log: LoggerConfig {
            log_path: Some("l".into()),
            level: Some(LoggerLevel::Warn),
            module: Some("a::b".to_owned()),
            show_level: Some(true),
            show_log_origin: Some(true),
        },
        metrics_path: Some("p".into()),
        boot_timer: true,
        no_seccomp: true,
        start_time_us: Some(1),
        start_time_cpu_us: Some(2),
        parent_cpu_time_us: Some(3),
        payload_limit: 51200,
        mmds_limit: 4,
    };
    assert_eq!(served(&mut given).unwrap(), expected);
}

#[test]
fn no_argument_is_ignored() {
    let honoured = [
        "api-sock",
        "boot-timer",
        "config-file",
        "describe-snapshot",
        "http-api-max-payload-size",
        "id",
        "level",
        "log-path",
        "metadata",
        "metrics-path",
        "mmds-size-limit",
        "module",
        "no-api",
        "no-seccomp",
        "parent-cpu-time-us",
        "show-level",
        "show-log-origin",
        "snapshot-version",
        "start-time-cpu-us",
        "start-time-us",
    ];
    for argument in &ARGUMENTS {
        let name = argument.name;
        let value = match (name, argument.takes_value) {
            ("level", _) => " info",
            (_, true) => " 1",
            (_, false) => "",
        };
        let file = if name == "no-api" { " --config-file f" } else { "" };
        match parse_line(&format!("--{name}{value}{file}")) {
            Ok(_) => assert!(honoured.contains(&name), "{name}"),
            Err(FirecrackerFault::ParseArguments(ArgumentFault::RefusedArgument(refused, _))) => {
                assert!(!honoured.contains(&name), "{name}");
                assert!(refused == name || !file.is_empty(), "{name}: {refused}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn wrong_lines_have_firecrackers_texts() {
    for (line, text) in [
        ("--foo", "Found argument 'foo' which wasn't expected, or isn't valid in this context."),
        ("foo", "Found argument 'foo' which wasn't expected, or isn't valid in this context."),
        ("--id=a", "Found argument 'id=a' which wasn't expected, or isn't valid in this context."),
        ("-- x", "Found argument 'x' which wasn't expected, or isn't valid in this context."),
        ("--id", "The argument 'id' requires a value, but none was supplied."),
        ("--id --api-sock", "The argument 'id' requires a value, but none was supplied."),
        ("--id -- a", "The argument 'id' requires a value, but none was supplied."),
        ("--id a --id a", "The argument 'id' was provided more than once."),
        ("--no-api", "Argument 'config-file' required, but not found."),
        (
            "--no-seccomp --seccomp-filter f",
            "Argument 'seccomp-filter' cannot be used together with argument 'no-seccomp'.",
        ),
        ("--id a_b", "Invalid instance ID: Invalid char (_) at position 1"),
        ("--start-time-us -1", "'start-time-us' parameter expected to be of 'u64' type."),
        (
            "--http-api-max-payload-size 1k",
            "'http-api-max-payload-size' parameter expected to be of 'usize' type.",
        ),
        (
            "--seccomp-filter f",
            "The argument 'seccomp-filter' is not honoured: the threads are not Firecracker's, so \
             its filters do not fit them.",
        ),
    ] {
        assert_eq!(fault(line).to_string(), text, "{line}");
    }
    assert_eq!(
        fault(&format!("--id {}", "a".repeat(65))).to_string(),
        "Invalid instance ID: Invalid len (65);  the length must be between 1 and 64"
    );
    let level = LevelFilterFromStrError("loud".to_owned());
    assert_eq!(parse_line("--level loud"), Err(FirecrackerFault::InvalidLogLevel(level)));
}

#[test]
fn help_and_version_win_over_everything() {
    assert_eq!(parse_line("--foo --version"), Ok(FirecrackerCommand::Version));
    assert_eq!(parse_line("--version --id --help"), Ok(FirecrackerCommand::Help));
    assert_eq!(parse_line("-h"), Ok(FirecrackerCommand::Help));
    assert!(matches!(fault("--foo -- --version"), ArgumentFault::UnexpectedArgument(_)));
}

#[test]
fn snapshot_versions_need_no_valid_id() {
    let version = parse_line("--id a_b --snapshot-version --describe-snapshot s");
    assert_eq!(version, Ok(FirecrackerCommand::SnapshotVersion));
    let described = Ok(FirecrackerCommand::DescribeSnapshot("s".into()));
    assert_eq!(parse_line("--describe-snapshot s --level loud"), described);
}

#[test]
fn help_lists_every_argument_in_order() {
    assert!(ARGUMENTS.is_sorted_by_key(|argument| argument.name));
    let help = help();
    for argument in &ARGUMENTS {
        assert!(help.contains(&format!("\n  --{} ", argument.name)), "{}", argument.name);
    }
    assert!(help.contains("[default: \"/run/firecracker.socket\"]"), "{help}");
    // Its value is a number.
    assert!(help.contains(&format!("[default: \"{PAYLOAD_LIMIT}\"]")), "{help}");
}
