//! `driftline serve`: a process without a guest answers Firecracker's API as Firecracker does, and
//! refuses by name what is not built yet.

use std::io::Write;
use std::os::unix::net::UnixStream;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, fail, status_field, succeed, wait_for};

const NOT_SUPPORTED: &str = "The requested operation is not supported: ";

#[test]
fn process_without_guest_shows_its_defaults() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &["--id", "web-1"]);
    let instance = vmm.get("/");
    assert_eq!(instance["id"], "web-1");
    assert_eq!(instance["state"], "Not started");
    assert_eq!(instance["app_name"], "Driftline");
    assert_eq!(vmm.get("/version"), json!({ "firecracker_version": instance["vmm_version"] }));
    let machine = json!({ "vcpu_count": 1, "mem_size_mib": 128, "smt": false,
        "track_dirty_pages": false, "huge_pages": "None" });
    assert_eq!(vmm.get("/machine-config"), machine);
    let config = vmm.get("/vm/config");
    assert_eq!(config["machine-config"], machine);
    assert_eq!(config["drives"], json!([]));
    assert_eq!(config["balloon"], Value::Null);
}

#[test]
fn configuration_without_files_is_set_and_shown() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    assert_eq!(vmm.get("/")["id"], "anonymous-instance");
    vmm.done("PUT", "/machine-config", r#"{"vcpu_count": 2, "mem_size_mib": 256}"#);
    vmm.done("PATCH", "/machine-config", r#"{"track_dirty_pages": true}"#);
    vmm.done("PUT", "/balloon", r#"{"amount_mib": 8, "deflate_on_oom": true}"#);
    vmm.done("PUT", "/entropy", "{}");
    vmm.done("PUT", "/serial", "{}");
    vmm.done("PUT", "/cpu-config", "{}");
    vmm.done("PUT", "/mmds", r#"{"a": {"b": 1}}"#);
    vmm.done("PATCH", "/mmds", r#"{"a": {"c": 2}}"#);
    let machine = vmm.get("/machine-config");
    assert_eq!((&machine["vcpu_count"], &machine["mem_size_mib"]), (&json!(2), &json!(256)));
    assert_eq!(machine["track_dirty_pages"], true);
    assert_eq!(vmm.get("/balloon")["amount_mib"], 8);
    assert_eq!(vmm.get("/mmds"), json!({ "a": { "b": 1, "c": 2 } }));
    let config = vmm.get("/vm/config");
    assert_eq!(config["entropy"], json!({ "rate_limiter": null }));
    assert_eq!(config["machine-config"], machine);
    let small = vmm.refusal("PATCH", "/machine-config", r#"{"mem_size_mib": 4}"#);
    assert!(small.starts_with("Machine config error: The memory size (MiB) is smaller"), "{small}");
    assert_eq!(vmm.get("/machine-config"), machine);
}

#[test]
fn deprecated_field_is_marked_in_the_answer() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let with = r#"{"vcpu_count": 1, "mem_size_mib": 64, "cpu_template": "None"}"#;
    let (status, head, _) = vmm.answer("PUT", "/machine-config", with);
    assert_eq!(status, 204);
    assert!(head.contains("\r\ndeprecation: true"), "{head}");
    let (_, head, _) = vmm.answer("PATCH", "/machine-config", r#"{"vcpu_count": 1}"#);
    assert!(!head.contains("deprecation"), "{head}");
}

#[test]
fn wrong_requests_get_the_texts_of_firecracker() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let before = "The requested operation is not supported before starting the microVM.";
    for (method, path, body, text) in [
        ("GET", "/foo", "", "Invalid request method and/or path: GET foo."),
        ("PUT", "/machine-config", "", "Empty PUT request."),
        ("GET", "/vm/config", "{}", "GET request cannot have a body."),
        ("PATCH", "/vm", r#"{"state": "Paused"}"#, before),
        ("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#, before),
        (
            "PUT",
            "/machine-config",
            r#"{"x": 1}"#,
            "An error occurred when deserializing the json body of a request: unknown field `x`, \
             expected one of `vcpu_count`, `mem_size_mib`, `smt`, `cpu_template`, \
             `track_dirty_pages`, `huge_pages` at line 1 column 4.",
        ),
        (
            "PUT",
            "/actions",
            r#"{"action_type": "InstanceStart"}"#,
            "Start microvm error: Cannot start microvm without kernel configuration.",
        ),
        ("GET", "/balloon", "", "Balloon config error: No balloon device found."),
    ] {
        assert_eq!(vmm.refusal(method, path, body), text, "{method} {path} {body}");
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let image = tmp.text("disk.img");
    std::fs::write(&image, [0; 512]).unwrap();
    for (path, body, name) in [
        ("/pmem/a", json!({ "id": "a", "path_on_host": &image }), "Driftline has no pmem devices"),
        (
            "/machine-config",
            json!({ "vcpu_count": 2, "mem_size_mib": 8, "cpu_template": "T2" }),
            "static CPU templates",
        ),
    ] {
        let text = vmm.refusal("PUT", path, &body.to_string());
        assert!(text.starts_with(NOT_SUPPORTED) && text.contains(name), "PUT {path}: {text}");
    }
    assert_eq!(vmm.get("/")["state"], "Not started");
}

/// Returns the files of the test's directory that a process has open, without the directory, and
/// whether it may write to them.
fn open_files(vmm: &ServeProcess, tmp: &TestDir) -> Vec<(String, bool)> {
    let of = format!("/proc/{}", vmm.pid());
    let mut files = Vec::new();
    for fd in std::fs::read_dir(format!("{of}/fd")).unwrap() {
        let fd = fd.unwrap();
        // A descriptor may have been closed meanwhile.
        let Ok(target) = std::fs::read_link(fd.path()) else { continue };
        let target = target.to_str().unwrap().to_owned();
        let Some(name) = target.strip_prefix(&tmp.text("")) else { continue };
        let number = fd.file_name().into_string().unwrap();
        let info = std::fs::read_to_string(format!("{of}/fdinfo/{number}")).unwrap();
        let flags = status_field(&info, "flags:").unwrap();
        files.push((name.to_owned(), u32::from_str_radix(flags, 8).unwrap() & 3 != 0));
    }
    files.sort();
    files
}

#[test]
fn named_files_are_opened_immediately() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    for name in ["kernel", "initrd", "root", "data", "other"] {
        std::fs::write(tmp.path(name), [0; 512]).unwrap();
    }
    let boot = |kernel: &str, initrd: Option<&str>| {
        let initrd = initrd.map(|name| tmp.text(name));
        json!({ "kernel_image_path": tmp.text(kernel), "initrd_path": initrd }).to_string()
    };
    let drive = |id: &str, name: &str, is_root: bool, read_only: bool| {
        json!({ "drive_id": id, "path_on_host": tmp.text(name), "is_root_device": is_root,
            "is_read_only": read_only })
        .to_string()
    };
    let open = || open_files(&vmm, &tmp);
    let file = |name: &str, writes: bool| (name.to_owned(), writes);
    vmm.done("PUT", "/boot-source", &boot("kernel", Some("initrd")));
    assert_eq!(open(), [file("initrd", false), file("kernel", false)]);
    vmm.done("PUT", "/drives/data", &drive("data", "data", false, false));
    vmm.done("PUT", "/drives/root", &drive("root", "root", true, true));
    // What was named is what is used, whatever happens to the name.
    std::fs::remove_file(tmp.path("data")).unwrap();
    std::fs::rename(tmp.path("kernel"), tmp.path("moved")).unwrap();
    let all = [
        file("data (deleted)", true),
        file("initrd", false),
        file("moved", false),
        file("root", false),
    ];
    assert_eq!(open(), all);
    let config = vmm.get("/vm/config");
    let ids: Vec<_> = config["drives"].as_array().unwrap().iter().map(|d| &d["drive_id"]).collect();
    assert_eq!(ids, ["root", "data"]);
    // A refused file replaces nothing.
    vmm.refusal("PUT", "/boot-source", &boot("other", Some("none")));
    vmm.refusal("PUT", "/drives/data", &drive("data", "none", false, false));
    assert_eq!((open(), vmm.get("/vm/config")), (all.to_vec(), config));
    // The earlier files are closed.
    vmm.done("PUT", "/boot-source", &boot("other", None));
    vmm.done("PUT", "/drives/data", &drive("data", "other", false, true));
    assert_eq!(open(), [file("other", false), file("other", false), file("root", false)]);
}

#[test]
fn files_are_refused_in_firecrackers_words() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let (none, file) = (tmp.text("none"), tmp.text("file"));
    let fifo = tmp.fifo("fifo").to_str().unwrap().to_owned();
    let dir = tmp.text("");
    std::fs::write(&file, [0; 512]).unwrap();
    let kernel = "Boot source error: The kernel file cannot be opened: ";
    let initrd = "Boot source error: The initrd file cannot be opened due to invalid path or \
                  invalid permissions. ";
    let drive = "Drive config error: Unable to create the virtio block device: Virtio backend \
                 error: Error manipulating the backing file: ";
    let missing = "No such file or directory (os error 2)";
    for (path, why) in
        [(&none, missing), (&fifo, "it is not a regular file"), (&dir, "it is not a regular file")]
    {
        let body = json!({ "kernel_image_path": path }).to_string();
        assert_eq!(vmm.refusal("PUT", "/boot-source", &body), format!("{kernel}{why}"));
        let body = json!({ "kernel_image_path": &file, "initrd_path": path }).to_string();
        assert_eq!(vmm.refusal("PUT", "/boot-source", &body), format!("{initrd}{why}"));
    }
    let no_disk = "it is neither a regular file nor a block device";
    for (path, why) in [(&none, missing), (&fifo, no_disk), (&dir, no_disk)] {
        let body = json!({ "drive_id": "a", "is_root_device": false, "path_on_host": path });
        let refusal = vmm.refusal("PUT", "/drives/a", &body.to_string());
        assert_eq!(refusal, format!("{drive}{why} {path}"));
    }
    let root = json!({ "drive_id": "a", "is_root_device": true, "path_on_host": &file });
    vmm.done("PUT", "/drives/a", &root.to_string());
    let second = json!({ "drive_id": "b", "is_root_device": true, "path_on_host": &file });
    let refusal = vmm.refusal("PUT", "/drives/b", &second.to_string());
    assert_eq!(refusal, "Drive config error: A root block device already exists!");
    let names: Vec<_> = open_files(&vmm, &tmp).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["file"]);
}

#[test]
fn own_requests_say_that_nothing_was_started() {
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    for path in ["/v1/info", "/v1/dirty", "/v1/migration"] {
        let text = vmm.refusal("GET", path, "");
        assert_eq!(text, "there is no guest yet: it has not been started", "GET {path}");
    }
    let message = fail(1, &["info", "--api-sock", &vmm.socket]);
    assert!(message.contains("it has not been started"), "{message}");
    let (status, _, page) = vmm.answer("GET", "/metrics", "");
    assert_eq!(status, 200, "{page}");
    // A thread of tokio's pool would keep the rights of a process without a guest, and serve later
    // requests.
    for task in std::fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap() {
        // A thread may have ended meanwhile.
        let name = std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default();
        assert!(!name.starts_with("tokio"), "{name}");
    }
    succeed(&["stop", "--api-sock", &vmm.socket]);
    let (code, stderr) = vmm.wait();
    assert_eq!(code, Some(1));
    assert!(stderr.contains("stopped over the API before a guest was started"), "{stderr}");
}

#[test]
fn signal_ends_a_process_without_guest() {
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    vmm.get("/");
    vmm.signal(Signal::TERM);
    let (code, stderr) = vmm.wait();
    assert_eq!(code, Some(1));
    assert!(stderr.contains("stopped by SIGTERM before a guest was started"), "{stderr}");
}

#[test]
fn simultaneous_clients_all_get_their_answers() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    std::thread::scope(|scope| {
        for n in 1..=8u8 {
            let vmm = &vmm;
            scope.spawn(move || {
                for _ in 0..20 {
                    vmm.done("PATCH", "/machine-config", &json!({ "vcpu_count": n }).to_string());
                    let vcpus = vmm.get("/machine-config")["vcpu_count"].as_u64().unwrap();
                    assert!((1..=8).contains(&vcpus));
                }
            });
        }
    });
}

#[test]
fn client_that_leaves_does_not_stop_others() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    for _ in 0..50 {
        let mut stream = UnixStream::connect(&vmm.socket).unwrap();
        let body = r#"{"vcpu_count": 2}"#;
        let head = format!("PATCH /machine-config HTTP/1.1\r\nContent-Length: {}\r\n", body.len());
        stream.write_all(format!("{head}Host: x\r\n\r\n{body}").as_bytes()).unwrap();
    }
    let garbage = vmm.exchange("no request at all\r\n\r\n");
    assert!(garbage.contains(" 400 ") && garbage.contains("{ \"error\": "), "{garbage}");
    assert_eq!(vmm.get("/")["state"], "Not started");
}

#[test]
fn silent_clients_keep_no_other_out() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let files = || std::fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap().count();
    // The process has opened what it needs before it answers.
    vmm.get("/");
    let before = files();
    // More answers than fit into a socket's buffers.
    let many = "GET /vm/config HTTP/1.1\r\n\r\n".repeat(2000);
    let says = ["", "GET /inf", "PUT /entropy HTTP/1.1\r\nContent-Length: 9\r\n\r\n{", &many];
    let held_open: Vec<UnixStream> = (0..400)
        .map(|n| {
            let mut stream = UnixStream::connect(&vmm.socket).unwrap();
            // The connection may have been displaced already.
            let _ = stream.write_all(says[n % says.len()].as_bytes());
            stream
        })
        .collect();
    assert_eq!(vmm.get("/")["state"], "Not started");
    // Refused while the server answers as many requests of others as it may at a time.
    wait_for("a turn", || (vmm.answer("PUT", "/entropy", "{}").0 == 204).then_some(()));
    // The idle connections that stay open, and some that are ending.
    wait_for("room", || (files() <= before + 64 + 16).then_some(()));
    drop(held_open);
    wait_for("files as before", || (files() <= before).then_some(()));
}

#[test]
fn wrong_id_is_a_usage_error() {
    let tmp = TestDir::new();
    let socket = tmp.text("serve.sock");
    for id in ["", "a_b", &"a".repeat(65)] {
        let message = fail(2, &["serve", "--api-sock", &socket, "--id", id]);
        assert!(message.contains("1 to 64 letters, digits and '-'"), "{id}: {message}");
    }
    assert!(fail(2, &["serve"]).contains("--api-sock"));
}
