//! The groups of Firecracker's metrics and the names in each.

/// A group of metrics.
pub(super) struct MetricsGroup {
    pub(super) name: &'static str,
    /// Names of numbers.
    pub(super) numbers: &'static [&'static str],
    /// Names of objects with the smallest, the largest and the total time, in microseconds.
    pub(super) times: &'static [&'static str],
}

const fn group(name: &'static str, numbers: &'static [&'static str]) -> MetricsGroup {
    MetricsGroup { name, numbers, times: &[] }
}

impl MetricsGroup {
    const fn with_times(self, times: &'static [&'static str]) -> Self {
        Self { times, ..self }
    }
}

/// The group of one drive, and of all together.
pub(super) const BLOCK: MetricsGroup = group(
    "block",
    &[
        "activate_fails",
        "cfg_fails",
        "no_avail_buffer",
        "event_fails",
        "execute_fails",
        "invalid_reqs_count",
        "flush_count",
        "queue_event_count",
        "rate_limiter_event_count",
        "update_count",
        "update_fails",
        "read_bytes",
        "write_bytes",
        "read_count",
        "write_count",
        "rate_limiter_throttled_events",
        "io_engine_throttled_events",
        "remaining_reqs_count",
    ],
)
.with_times(&["read_agg", "write_agg"]);

/// The group of one network interface, and of all together.
pub(super) const NET: MetricsGroup = group(
    "net",
    &[
        "activate_fails",
        "cfg_fails",
        "mac_address_updates",
        "no_rx_avail_buffer",
        "no_tx_avail_buffer",
        "event_fails",
        "rx_queue_event_count",
        "rx_event_rate_limiter_count",
        "rx_rate_limiter_throttled",
        "rx_tap_event_count",
        "rx_bytes_count",
        "rx_packets_count",
        "rx_fails",
        "rx_count",
        "tap_read_fails",
        "tap_write_fails",
        "tx_bytes_count",
        "tx_malformed_frames",
        "tx_fails",
        "tx_count",
        "tx_packets_count",
        "tx_queue_event_count",
        "tx_rate_limiter_event_count",
        "tx_rate_limiter_throttled",
        "tx_spoofed_mac_count",
        "tx_remaining_reqs_count",
    ],
)
.with_times(&["tap_write_agg"]);

/// The groups that every line has once.
pub(super) const GROUPS: [MetricsGroup; 22] = [
    group("api_server", &["process_startup_time_us", "process_startup_time_cpu_us"]),
    group(
        "balloon",
        &[
            "activate_fails",
            "inflate_count",
            "stats_updates_count",
            "stats_update_fails",
            "deflate_count",
            "event_fails",
            "free_page_report_count",
            "free_page_report_freed",
            "free_page_report_fails",
            "free_page_hint_count",
            "free_page_hint_freed",
            "free_page_hint_fails",
        ],
    ),
    BLOCK,
    group("deprecated_api", &["deprecated_http_api_calls"]),
    group(
        "get_api_requests",
        &[
            "instance_info_count",
            "machine_cfg_count",
            "mmds_count",
            "vmm_version_count",
            "hotplug_memory_count",
        ],
    ),
    group(
        "i8042",
        &[
            "error_count",
            "missed_read_count",
            "missed_write_count",
            "read_count",
            "reset_count",
            "write_count",
        ],
    ),
    group(
        "uart",
        &[
            "error_count",
            "flush_count",
            "missed_read_count",
            "missed_write_count",
            "read_count",
            "write_count",
            "rate_limiter_dropped_bytes",
        ],
    ),
    group(
        "latencies_us",
        &[
            "full_create_snapshot",
            "diff_create_snapshot",
            "load_snapshot",
            "pause_vm",
            "resume_vm",
            "vmm_full_create_snapshot",
            "vmm_diff_create_snapshot",
            "vmm_load_snapshot",
            "vmm_pause_vm",
            "vmm_resume_vm",
        ],
    ),
    group(
        "logger",
        &["missed_metrics_count", "metrics_fails", "missed_log_count", "rate_limited_log_count"],
    ),
    group(
        "mmds",
        &[
            "rx_accepted",
            "rx_accepted_err",
            "rx_accepted_unusual",
            "rx_bad_eth",
            "rx_invalid_token",
            "rx_no_token",
            "rx_count",
            "tx_bytes",
            "tx_count",
            "tx_errors",
            "tx_frames",
            "connections_created",
            "connections_destroyed",
        ],
    ),
    NET,
    group(
        "patch_api_requests",
        &[
            "drive_count",
            "drive_fails",
            "network_count",
            "network_fails",
            "machine_cfg_count",
            "machine_cfg_fails",
            "mmds_count",
            "mmds_fails",
            "hotplug_memory_count",
            "hotplug_memory_fails",
            "pmem_count",
            "pmem_fails",
        ],
    ),
    group(
        "put_api_requests",
        &[
            "actions_count",
            "actions_fails",
            "boot_source_count",
            "boot_source_fails",
            "drive_count",
            "drive_fails",
            "logger_count",
            "logger_fails",
            "machine_cfg_count",
            "machine_cfg_fails",
            "cpu_cfg_count",
            "cpu_cfg_fails",
            "metrics_count",
            "metrics_fails",
            "network_count",
            "network_fails",
            "mmds_count",
            "mmds_fails",
            "vsock_count",
            "vsock_fails",
            "pmem_count",
            "pmem_fails",
            "serial_count",
            "serial_fails",
            "hotplug_memory_count",
            "hotplug_memory_fails",
        ],
    ),
    group("seccomp", &["num_faults"]),
    group(
        "vcpu",
        &[
            "exit_io_in",
            "exit_io_out",
            "exit_mmio_read",
            "exit_mmio_write",
            "failures",
            "kvmclock_ctrl_fails",
        ],
    )
    .with_times(&[
        "exit_io_in_agg",
        "exit_io_out_agg",
        "exit_mmio_read_agg",
        "exit_mmio_write_agg",
    ]),
    group("vmm", &["panic_count"]),
    group("signals", &["sigbus", "sigsegv", "sigxfsz", "sigxcpu", "sigpipe", "sighup", "sigill"]),
    group(
        "vsock",
        &[
            "activate_fails",
            "cfg_fails",
            "rx_queue_event_fails",
            "tx_queue_event_fails",
            "ev_queue_event_fails",
            "muxer_event_fails",
            "conn_event_fails",
            "rx_queue_event_count",
            "tx_queue_event_count",
            "rx_bytes_count",
            "tx_bytes_count",
            "rx_packets_count",
            "tx_packets_count",
            "conns_added",
            "conns_killed",
            "conns_removed",
            "killq_resync",
            "tx_flush_fails",
            "tx_write_fails",
            "rx_read_fails",
        ],
    ),
    group(
        "entropy",
        &[
            "activate_fails",
            "entropy_event_fails",
            "entropy_event_count",
            "entropy_bytes",
            "host_rng_fails",
            "entropy_rate_limiter_throttled",
            "rate_limiter_event_count",
        ],
    ),
    group(
        "pmem",
        &[
            "activate_fails",
            "cfg_fails",
            "event_fails",
            "queue_event_count",
            "rate_limiter_throttled_events",
            "rate_limiter_event_count",
        ],
    ),
    group("interrupts", &["triggers", "config_updates"]),
    group(
        "memory_hotplug",
        &[
            "activate_fails",
            "queue_event_fails",
            "queue_event_count",
            "plug_count",
            "plug_bytes",
            "plug_fails",
            "unplug_count",
            "unplug_bytes",
            "unplug_fails",
            "unplug_discard_fails",
            "unplug_all_count",
            "unplug_all_fails",
            "state_count",
            "state_fails",
        ],
    )
    .with_times(&["plug_agg", "unplug_agg", "unplug_all_agg", "state_agg"]),
];
