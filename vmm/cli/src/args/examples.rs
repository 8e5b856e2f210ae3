//! Has the examples at the end of each command's help. A test reads every one as a command line.

pub(super) const DRIFTLINE: &str = "\
Examples:
  driftline demo
  driftline run --kernel vmlinux --initrd initrd.img --api-sock a.sock
  driftline checkpoint --api-sock a.sock --store backup --every 1s --keep 10
  driftline COMMAND --help";
pub(super) const DEMO: &str = "\
Examples:
  driftline demo
  driftline demo --backend threads --json";
pub(super) const RUN: &str = "\
Examples:
  driftline run --kernel vmlinux --cmdline root=/dev/vda --disk path=root.img --mem 2G --vcpus 2
  driftline run --guest payload,ws=64M,rate=320M --api-sock a.sock
  driftline run --config-file web-1.json --mem 4G --api-sock web-1.sock";
pub(super) const SERVE: &str = "\
Example:
  driftline serve --api-sock a.sock --id web-1";
pub(super) const FIRECRACKER: &str = "\
Examples:
  driftline firecracker --api-sock a.sock --id web-1
  driftline firecracker --no-api --config-file vm.json";
pub(super) const INFO: &str = "\
Examples:
  driftline info --api-sock a.sock
  driftline info --api-sock a.sock --json";
pub(super) const BALLOON: &str = "\
Examples:
  driftline balloon --api-sock a.sock
  driftline balloon --api-sock a.sock --size 256M";
pub(super) const PAUSE: &str = "\
Example:
  driftline pause --api-sock a.sock";
pub(super) const RESUME: &str = "\
Example:
  driftline resume --api-sock a.sock";
pub(super) const NMI: &str = "\
Example:
  driftline nmi --api-sock a.sock";
pub(super) const STOP: &str = "\
Examples:
  driftline stop --api-sock a.sock
  driftline stop --api-sock a.sock --wait --timeout 60s";
pub(super) const CHECKPOINT: &str = "\
Examples:
  driftline checkpoint --api-sock a.sock --store backup
  driftline checkpoint --api-sock a.sock --store backup --every 200ms --keep 50 --detach
  driftline checkpoint --api-sock a.sock --stop";
pub(super) const RESTORE: &str = "\
Examples:
  driftline restore --store backup --same-id --api-sock a.sock
  driftline restore --store backup --checkpoint 3 --lazy --name clone-1 --disk path=copy.img";
pub(super) const RECEIVE: &str = "\
Examples:
  driftline receive-migration tcp:10.0.0.2:7000 --tls-dir /etc/driftline/tls --api-sock b.sock
  driftline receive-migration unix:/run/moves.sock --disk path=/srv/root.img,id=disk0,copy";
pub(super) const SEND: &str = "\
Examples:
  driftline send-migration tcp:10.0.0.2:7000 --tls-dir /etc/driftline/tls --api-sock a.sock
  driftline send-migration unix:/run/moves.sock --api-sock a.sock --copy-disks --compress lz4";
pub(super) const UPGRADE: &str = "\
Examples:
  driftline upgrade --api-sock a.sock
  driftline upgrade --api-sock a.sock --binary /usr/bin/driftline --json";
pub(super) const TAKE_OVER: &str = "\
Example:
  driftline take-over 3";
pub(super) const PLAN: &str = "\
Example:
  driftline plan --api-sock a.sock --bandwidth 100M";
pub(super) const TOP: &str = "\
Examples:
  driftline top --api-sock a.sock
  driftline top --api-sock a.sock --once --json";
pub(super) const CANCEL: &str = "\
Example:
  driftline cancel-migration --api-sock a.sock";
pub(super) const RESOLVE: &str = "\
Examples:
  driftline resolve --api-sock a.sock --run
  driftline resolve --state-dir /var/lib/driftline --discard";
pub(super) const COMPARE: &str = "\
Examples:
  driftline compare --html report.html
  driftline compare --modes dirty-ring,dirty-bitmap --mem 1G,4G --guest payload,ws=64M,rate=320M";
pub(super) const DOCTOR: &str = "\
Examples:
  driftline doctor
  driftline doctor --check --json";
pub(super) const STORE: &str = "\
Examples:
  driftline store ls backup
  driftline store verify backup";
pub(super) const STORE_LS: &str = "\
Example:
  driftline store ls backup --json";
pub(super) const STORE_VERIFY: &str = "\
Example:
  driftline store verify backup";
pub(super) const STORE_REPAIR: &str = "\
Examples:
  driftline store repair backup --dry-run
  driftline store repair backup";
pub(super) const STORE_COMPACT: &str = "\
Example:
  driftline store compact backup";
pub(super) const STORE_EXPORT: &str = "\
Examples:
  driftline store export backup --output memory.core --format elf-core
  driftline store export backup --checkpoint 3 --output guest.zst --format driftline-zstd";
