//! Certificates for tests, made with `openssl` like those of `docs/src/operating/certificates.md`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Dates of certificates that are valid now, that have expired, and that are not valid yet.
pub const NOW: [&str; 2] = ["20200101000000Z", "20990101000000Z"];
pub const PAST: [&str; 2] = ["20200101000000Z", "20210101000000Z"];
pub const FUTURE: [&str; 2] = ["20980101000000Z", "20990101000000Z"];

const CONFIG: &str = "[ca]\ndefault_ca=d\n[d]\ndatabase=index\nserial=serial\nnew_certs_dir=.\n\
    default_md=sha256\npolicy=p\nunique_subject=no\n[p]\ncommonName=supplied\n";

/// A certificate authority in a directory of its own.
pub struct TestCa {
    dir: tempfile::TempDir,
    name: String,
}

impl TestCa {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().file_name().unwrap().to_string_lossy().into_owned();
        Self::named(dir, name)
    }

    /// Returns another authority of the same name.
    pub fn twin(&self) -> Self {
        Self::named(tempfile::tempdir().unwrap(), self.name.clone())
    }

    fn named(dir: tempfile::TempDir, name: String) -> Self {
        let ca = Self { dir, name };
        for (name, content) in [("ca.cnf", CONFIG), ("index", ""), ("serial", "01\n")] {
            std::fs::write(ca.dir.path().join(name), content).unwrap();
        }
        ca.new_key("ca-key.pem");
        let subject = format!("/CN={}", ca.name);
        ca.openssl(&[
            "req",
            "-x509",
            "-new",
            "-key",
            "ca-key.pem",
            "-days",
            "3650",
            "-subj",
            &subject,
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign",
            "-out",
            "ca-cert.pem",
        ]);
        ca
    }

    pub fn certificate(&self) -> PathBuf {
        self.dir.path().join("ca-cert.pem")
    }

    /// Writes the certificate and the key of `role` (`client` or `server`) with these alternative
    /// names into `dir`.
    pub fn issue(&self, dir: &Path, role: &str, names: &str, dates: [&str; 2]) {
        let [key, certificate] = ["key", "cert"].map(|kind| format!("{role}-{kind}.pem"));
        self.new_key(&key);
        self.openssl(&["req", "-new", "-key", &key, "-subj", "/CN=host", "-out", "csr"]);
        let extensions = format!("subjectAltName={names}\nextendedKeyUsage={role}Auth\n");
        std::fs::write(self.dir.path().join("ext"), extensions).unwrap();
        let [from, until] = dates;
        self.openssl(&[
            "ca",
            "-batch",
            "-notext",
            "-config",
            "ca.cnf",
            "-cert",
            "ca-cert.pem",
            "-keyfile",
            "ca-key.pem",
            "-in",
            "csr",
            "-out",
            &certificate,
            "-extfile",
            "ext",
            "-startdate",
            from,
            "-enddate",
            until,
        ]);
        for name in [&key, &certificate] {
            std::fs::copy(self.dir.path().join(name), dir.join(name)).unwrap();
        }
    }

    fn new_key(&self, name: &str) {
        self.openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", name]);
    }

    fn openssl(&self, args: &[&str]) {
        let out = Command::new("openssl").args(args).current_dir(self.dir.path()).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
}
