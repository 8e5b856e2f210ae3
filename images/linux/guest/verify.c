/*
 * The disk checker's verdict on an entire log: opens it, reads every slot, and reports losses.
 *
 * Only records after the last flush may be missing. Each record says which record was flushed when
 * it was written, so the log contains most of its flush points. The caller may know later ones from
 * a status line.
 */
#include "check.h"
#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK_BLOCKS = 64 };

static unsigned char chunk[CHUNK_BLOCKS * BLOCK_BYTES] __attribute__((aligned(BLOCK_BYTES)));

bool disk_log_open(struct disk_log *log, int flags)
{
    log->direct = true;
    log->fd = open(log->path, flags | O_DIRECT | O_CLOEXEC, 0644);
    if (log->fd < 0 && errno == EINVAL) {
        log->direct = false;
        log->fd = open(log->path, flags | O_CLOEXEC, 0644);
    }
    /* Seeking to the end also gives the size of a device. */
    off_t end = log->fd < 0 ? -1 : lseek(log->fd, 0, SEEK_END);
    if (end < 0) {
        say("check disk: cannot open %s: %s", log->path, strerror(errno));
        return false;
    }
    log->bytes = (uint64_t)end;
    return true;
}

bool disk_log_header(struct disk_log *log)
{
    if (pread(log->fd, chunk, BLOCK_BYTES, 0) != BLOCK_BYTES || !header_decode(chunk, &log->header))
        return false;
    /* The file of a short run ends at its last record; slots beyond it read as empty. */
    return log->header.slots < UINT64_MAX / BLOCK_BYTES - 1;
}

/* Calls `visit` with the record of every slot; number 0 means unreadable. */
static bool slots_visit(struct disk_log *log,
                        void (*visit)(void *, uint64_t slot, const struct record *), void *context)
{
    const uint64_t slots = log->header.slots, in_file = log->bytes / BLOCK_BYTES;
    for (uint64_t first = 0; first < slots && first + 1 < in_file; first += CHUNK_BLOCKS) {
        uint64_t blocks = slots - first < CHUNK_BLOCKS ? slots - first : CHUNK_BLOCKS;
        if (in_file - first - 1 < blocks)
            blocks = in_file - first - 1;
        ssize_t bytes = (ssize_t)(blocks * BLOCK_BYTES);
        errno = 0;
        if (pread(log->fd, chunk, (size_t)bytes, (off_t)((first + 1) * BLOCK_BYTES)) != bytes) {
            say("check disk: cannot read slot %" PRIu64 " of %s: %s", first, log->path,
                errno ? strerror(errno) : "read in part");
            return false;
        }
        for (uint64_t i = 0; i < blocks; i++) {
            struct record record;
            if (!record_decode(chunk + i * BLOCK_BYTES, log->header.run, &record))
                record = (struct record){0};
            visit(context, first + i, &record);
        }
    }
    return true;
}

static void find_flushed(void *context, uint64_t slot, const struct record *record)
{
    struct disk_verdict *verdict = context;
    (void)slot;
    if (record->number > verdict->last)
        verdict->last = record->number;
    if (record->flushed > verdict->flushed)
        verdict->flushed = record->flushed;
}

struct judging {
    const struct disk_log *log;
    struct disk_verdict *verdict;
};

static void judge(void *context, uint64_t slot, const struct record *record)
{
    static const char *const text[] = {[SLOT_LOST] = "a flushed write was lost or rolled back",
                                       [SLOT_AHEAD] = "it cannot have been written yet"};
    const struct judging *judging = context;
    struct disk_verdict *verdict = judging->verdict;
    uint64_t slots = judging->log->header.slots;
    enum slot_verdict is = slot_judge(slot, slots, record->number, verdict->flushed);
    if (is == SLOT_GOOD || is == SLOT_TORN)
        return;
    if (verdict->errors++ < ERRORS_DESCRIBED)
        say("check disk: error: slot %" PRIu64 " must hold record %" PRIu64
            " and holds record %" PRIu64 ": %s",
            slot, record_due(slot, slots, verdict->flushed), record->number, text[is]);
}

bool disk_log_judge(struct disk_log *log, uint64_t promised, struct disk_verdict *verdict)
{
    *verdict = (struct disk_verdict){.flushed = promised};
    if (!slots_visit(log, find_flushed, verdict))
        return false;
    struct judging judging = {log, verdict};
    if (!slots_visit(log, judge, &judging))
        return false;
    /* Slots past the end of the file hold nothing. */
    uint64_t in_file = log->bytes / BLOCK_BYTES, read = in_file ? in_file - 1 : 0;
    uint64_t promised_slots =
        verdict->flushed < log->header.slots ? verdict->flushed : log->header.slots;
    for (uint64_t slot = read; slot < promised_slots; slot++)
        judge(&judging, slot, &(struct record){0});
    return true;
}

int disk_verify_main(int words, char **word)
{
    const char *path = "/dev/vda";
    uint64_t at_least = 0;
    const struct option table[] = {{"path", OPTION_TEXT, &path},
                                   {"at-least", OPTION_NUMBER, &at_least}};
    if (!options_read("disk-verify", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;

    struct disk_log log = {.path = path};
    struct disk_verdict verdict;
    if (!disk_log_open(&log, O_RDONLY))
        return EXIT_FAILED;
    if (!disk_log_header(&log)) {
        say("check disk: %s holds no log", path);
        return EXIT_FAILED;
    }
    if (!disk_log_judge(&log, at_least, &verdict))
        return EXIT_FAILED;
    say("check disk: verify last=%" PRIu64 " flushed=%" PRIu64 " errors=%" PRIu64 " intact=%s",
        verdict.last, verdict.flushed, verdict.errors, verdict.errors ? "no" : "yes");
    return verdict.errors ? EXIT_FAILED : EXIT_PASSED;
}
