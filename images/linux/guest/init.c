/*
 * /init: mounts, sets up the network, starts a shell on the console and the checkers that the
 * kernel command line names, then reaps children. It is a program and not a script, because each
 * process that a script starts takes tens of milliseconds where ring 0 is emulated.
 *
 *   driftline.ip=ADDRESS/BITS      eth0's address        driftline.gw=ADDRESS    the default route
 *   driftline.mount=DEV:DIR[:TYPE] mounts DEV, ext4 unless told otherwise
 *   driftline.check=NAME,NAME,..   mem, disk, tcp, clock, fork
 *   driftline.NAME=KEY=VALUE,..    that checker's options
 *
 * Each missing part (no disk, no network) is reported in one line and skipped.
 */
#include "check.h"
#include "network.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COMMAND_LINE_BYTES = 4096, WORDS_MOST = 16 };

static const struct {
    const char *name;
    int (*main)(int, char **);
} checker[] = {
    {"mem", mem_main},
    {"disk", disk_main},
    {"tcp", tcp_main},
    {"clock", clock_main},
    {"fork", fork_main},
};

enum { CHECKERS = sizeof checker / sizeof *checker };

static char command_line[COMMAND_LINE_BYTES];
static pid_t shell, running[CHECKERS];

/* Returns a copy of the value of the last word `driftline.KEY=value` on the kernel command line. */
static bool setting(const char *key, char *value, size_t bytes)
{
    bool found = false;
    size_t length = strlen(key);
    for (const char *at = command_line; *at;) {
        at += strspn(at, " \n");
        size_t word = strcspn(at, " \n");
        if (word > 10 + length && memcmp(at, "driftline.", 10) == 0 &&
            memcmp(at + 10, key, length) == 0 && at[10 + length] == '=') {
            const char *start = at + 11 + length;
            snprintf(value, bytes, "%.*s", (int)(at + word - start), start);
            found = true;
        }
        at += word;
    }
    return found;
}

static void mount_at(const char *source, const char *directory, const char *type)
{
    if (mkdir(directory, 0755) != 0 && errno != EEXIST)
        say("driftline-linux: cannot make %s: %s", directory, strerror(errno));
    else if (mount(source, directory, type, 0, NULL) != 0)
        say("driftline-linux: cannot mount %s on %s: %s", source, directory, strerror(errno));
}

/*
 * Linux disables huge pages on machines of less than 512 MiB, where the memory checker needs them,
 * too.
 */
static void huge_pages_allow(void)
{
    static const char wanted[] = "madvise";
    int file = open("/sys/kernel/mm/transparent_hugepage/enabled", O_WRONLY | O_CLOEXEC);
    if (file >= 0 && write(file, wanted, sizeof wanted - 1) < 0)
        say("driftline-linux: cannot allow huge pages: %s", strerror(errno));
    close(file);
}

/* DEV:DIR[:TYPE] */
static void mount_disk(char *wanted)
{
    char *rest = wanted, *device = strsep(&rest, ":"), *directory = strsep(&rest, ":");
    if (directory)
        mount_at(device, directory, rest ? rest : "ext4");
    else
        say("driftline-linux: driftline.mount=%s is not DEV:DIR[:TYPE]", wanted);
}

/* In a child: default signal actions, no blocked signals. */
static void child_begin(const char *name)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, name);
    setsid();
}

/*
 * Each checker opens the console itself, so that the shell's terminal settings do not affect it. A
 * checker is forked and not executed, because the pages of the program are already in memory.
 */
static pid_t checker_start(int which)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    child_begin(checker[which].name);
    int null = open("/dev/null", O_RDONLY), console = open("/dev/console", O_WRONLY | O_NOCTTY);
    dup2(null, STDIN_FILENO);
    if (console >= 0) {
        dup2(console, STDOUT_FILENO);
        dup2(console, STDERR_FILENO);
    }
    static char options[COMMAND_LINE_BYTES];
    char *word[WORDS_MOST];
    int words = 0;
    if (setting(checker[which].name, options, sizeof options)) {
        char *rest = options;
        while (words < WORDS_MOST && (word[words] = strsep(&rest, ",")))
            words++;
    }
    _exit(checker[which].main(words, word));
}

static void checkers_start(char *names)
{
    for (char *name; (name = strsep(&names, ","));) {
        int which = 0;
        while (which < CHECKERS && strcmp(name, checker[which].name) != 0)
            which++;
        if (which == CHECKERS)
            say("driftline-linux: there is no checker '%s'; there are mem, disk, tcp, clock, fork",
                name);
        else if (running[which] == 0)
            running[which] = checker_start(which);
    }
}

static pid_t shell_start(void)
{
    pid_t child = fork();
    if (child != 0)
        return child;
    child_begin("sh");
    int console = open("/dev/console", O_RDWR);
    for (int fd = 0; console >= 0 && fd < 3; fd++)
        dup2(console, fd);
    if (console > 2)
        close(console);
    ioctl(STDIN_FILENO, TIOCSCTTY, 0);
    /*
     * busybox is a glibc program, which would use AVX for its copies. A kernel booted with
     * `noxsave` does not save AVX registers at context switches, so glibc must not use them.
     */
    static char *const environment[] = {
        "PATH=/bin", "HOME=/", "TERM=vt100",
        "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW",
        NULL};
    execve("/bin/busybox", (char *[]){"-sh", NULL}, environment);
    say("driftline-linux: cannot run /bin/busybox: %s", strerror(errno));
    _exit(EXIT_FAILED);
}

/* Reaps all children that have ended. Restarts the shell; reports a checker that has ended. */
static void reap(void)
{
    int status;
    for (pid_t child; (child = waitpid(-1, &status, WNOHANG)) > 0;) {
        for (int i = 0; i < CHECKERS; i++) {
            if (running[i] != child)
                continue;
            running[i] = 0;
            if (WIFEXITED(status))
                say("driftline-linux: checker %s ended with code %d", checker[i].name,
                    WEXITSTATUS(status));
            else
                say("driftline-linux: checker %s was ended by signal %d", checker[i].name,
                    WTERMSIG(status));
        }
        if (child == shell) {
            sleep_ms(200); /* Limits the rate of restarts if the shell cannot start. */
            shell = shell_start();
        }
    }
}

static void machine_end(unsigned int how)
{
    sync();
    reboot((int)how);
}

int init_main(void)
{
    mount_at("devtmpfs", "/dev", "devtmpfs");
    mount_at("proc", "/proc", "proc");
    mount_at("sysfs", "/sys", "sysfs");
    int file = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t got = read(file, command_line, sizeof command_line - 1);
        command_line[got > 0 ? got : 0] = '\0';
        close(file);
    }

    sigset_t awaited;
    sigemptyset(&awaited);
    for (size_t i = 0; i < 4; i++)
        sigaddset(&awaited, (int[]){SIGCHLD, SIGTERM, SIGUSR1, SIGUSR2}[i]);
    sigprocmask(SIG_BLOCK, &awaited, NULL);

    char value[COMMAND_LINE_BYTES], gateway[64];
    network_loopback();
    if (setting("ip", value, sizeof value))
        network_start("eth0", value, setting("gw", gateway, sizeof gateway) ? gateway : NULL);
    shell = shell_start();
    if (setting("mount", value, sizeof value))
        mount_disk(value);
    huge_pages_allow();
    if (setting("check", value, sizeof value))
        checkers_start(value);

    /* Signals that busybox's reboot, halt and poweroff send to process 1. */
    for (int signal;;) {
        if (sigwait(&awaited, &signal) != 0)
            continue;
        if (signal == SIGCHLD)
            reap();
        else if (signal == SIGTERM)
            machine_end(RB_AUTOBOOT);
        else
            machine_end(signal == SIGUSR2 ? (unsigned int)RB_POWER_OFF : RB_HALT_SYSTEM);
    }
}
