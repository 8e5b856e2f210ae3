/*
 * The disk checker: appends numbered records to a log, flushes them, and reads back earlier flushed
 * records.
 *
 * It owns the log's file or device while it runs. Reads bypass the guest's page cache where the
 * file system supports that (O_DIRECT), so that the data of the disk is compared.
 */
#include "check.h"
#include "disk.h"
#include "record.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS_LEAST = 4 * BATCH_MOST, READ_BACKS = 2 };

struct disk {
    struct disk_log log;
    uint64_t flushed, errors;
    uint64_t random;
};

static unsigned char batch_block[BATCH_MOST * BLOCK_BYTES] __attribute__((aligned(BLOCK_BYTES)));

static void error_of(struct disk *disk, const char *what, uint64_t record, const char *why)
{
    if (disk->errors++ < ERRORS_DESCRIBED)
        say("check disk: error: %s record %" PRIu64 ": %s", what, record, why);
}

/* Starts the log of a new run over any older one, whose records do not belong to it. */
static bool log_create(struct disk_log *log, uint64_t size)
{
    uint64_t room = log->bytes && log->bytes < size ? log->bytes : size;
    uint64_t slots = room / BLOCK_BYTES;
    if (slots < SLOTS_LEAST + 1) {
        say("check disk: %s has room for %" PRIu64 " blocks; a log takes at least %d", log->path,
            slots, SLOTS_LEAST + 1);
        return false;
    }
    log->header = (struct log_header){.run = scramble(clock_ns(CLOCK_REALTIME) ^ now_ns() << 32),
                                      .slots = slots - 1};
    header_encode(batch_block, &log->header);
    if (pwrite(log->fd, batch_block, BLOCK_BYTES, 0) != BLOCK_BYTES || fdatasync(log->fd) != 0) {
        say("check disk: cannot write the header of %s: %s", log->path, strerror(errno));
        return false;
    }
    return true;
}

/* Writes `records` records after the last flushed one, in up to two pieces, and flushes them. */
static bool batch_write(struct disk *disk, uint64_t records)
{
    const struct log_header *header = &disk->log.header;
    for (uint64_t i = 0; i < records;) {
        uint64_t first = disk->flushed + 1 + i, piece = 0;
        do {
            struct record record = {
                .run = header->run, .number = first + piece, .flushed = disk->flushed};
            record_encode(batch_block + piece * BLOCK_BYTES, &record);
            piece++;
        } while (i + piece < records && (first + piece - 1) % header->slots != 0);
        ssize_t bytes = (ssize_t)(piece * BLOCK_BYTES);
        errno = 0;
        if (pwrite(disk->log.fd, batch_block, (size_t)bytes,
                   (off_t)record_offset(first, header->slots)) != bytes) {
            error_of(disk, "writing", first, errno ? strerror(errno) : "written in part");
            return false;
        }
        i += piece;
    }
    if (fdatasync(disk->log.fd) != 0) {
        error_of(disk, "flushing", disk->flushed + records, strerror(errno));
        return false;
    }
    disk->flushed += records;
    return true;
}

/* Reads a random flushed record back and checks it. */
static void read_back(struct disk *disk)
{
    const struct log_header *header = &disk->log.header;
    uint64_t kept = disk->flushed < header->slots ? disk->flushed : header->slots;
    if (kept == 0)
        return;
    uint64_t number = disk->flushed - random_next(&disk->random) % kept;
    errno = 0;
    if (pread(disk->log.fd, batch_block, BLOCK_BYTES,
              (off_t)record_offset(number, header->slots)) != BLOCK_BYTES) {
        error_of(disk, "reading", number, errno ? strerror(errno) : "read in part");
        return;
    }
    struct record found;
    char why[160];
    if (!record_decode(batch_block, header->run, &found))
        snprintf(why, sizeof why, "unreadable, or no record of this log");
    else if (found.number < number)
        snprintf(why, sizeof why,
                 "record %" PRIu64 " is in its place: a flushed write was lost or rolled back",
                 found.number);
    else if (found.number > number)
        snprintf(why, sizeof why,
                 "record %" PRIu64 " is in its place: the disk is ahead of the memory",
                 found.number);
    else
        return;
    error_of(disk, "reading back", number, why);
}

/* Opens and verifies the existing log, or creates a new one. False if the disk cannot be used. */
static bool log_begin(struct disk *disk, uint64_t size)
{
    struct disk_verdict verdict;
    if (!disk_log_header(&disk->log))
        return log_create(&disk->log, size);
    if (!disk_log_judge(&disk->log, 0, &verdict))
        return false;
    disk->flushed = verdict.flushed;
    disk->errors = verdict.errors;
    say("check disk: found a log: last=%" PRIu64 " flushed=%" PRIu64 " errors=%" PRIu64,
        verdict.last, verdict.flushed, verdict.errors);
    return true;
}

int disk_main(int words, char **word)
{
    const char *path = "/dev/vda";
    uint64_t size = 16 << 20, pause = 100, every = 1000;
    const struct option table[] = {{"path", OPTION_TEXT, &path},
                                   {"size", OPTION_SIZE, &size},
                                   {"pause", OPTION_DURATION, &pause},
                                   {"every", OPTION_DURATION, &every}};
    if (!options_read("disk", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;

    struct disk disk = {.log = {.path = path}, .random = now_ns()};
    /* A missing disk must not become a file of that name. */
    int create = strncmp(path, "/dev/", 5) == 0 ? 0 : O_CREAT;
    if (!disk_log_open(&disk.log, O_RDWR | create) || !log_begin(&disk, size))
        return EXIT_FAILED;
    say("check disk: ready path=%s slots=%" PRIu64 " direct=%d", path, disk.log.header.slots,
        disk.log.direct);
    for (uint64_t due = now_ns();;) {
        bool written = batch_write(&disk, 1 + random_next(&disk.random) % BATCH_MOST);
        for (int i = 0; i < READ_BACKS; i++)
            read_back(&disk);
        if (period_over(&due, every))
            say("check disk: flushed=%" PRIu64 " errors=%" PRIu64, disk.flushed, disk.errors);
        /* A disk that refuses writes is retried, at intervals. */
        sleep_ms(written ? pause : 1000);
    }
}
