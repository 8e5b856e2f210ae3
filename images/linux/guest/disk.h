/* An open log on a file or block device, and the result of reading all of it. */
#ifndef DRIFTLINE_DISK_H
#define DRIFTLINE_DISK_H

#include "record.h"

struct disk_log {
    const char *path;
    int fd;
    bool direct;    /* reads and writes bypass the page cache */
    uint64_t bytes; /* size of the device or file; 0 for a file that is still empty */
    struct log_header header;
};

struct disk_verdict {
    uint64_t last;    /* the highest record that is readable */
    uint64_t flushed; /* the highest flushed record, as the log or the caller knows */
    uint64_t errors;  /* slots with wrong content */
};

/*
 * Opens `log->path`, with O_DIRECT if possible, and finds its size. Prints the reason if it fails.
 */
bool disk_log_open(struct disk_log *log, int flags);
/* Reads the header; false if there is none, or if no file can have as many slots as it names. */
bool disk_log_header(struct disk_log *log);
/*
 * Reads the entire log and checks every slot, given that record `promised` was flushed. False if it
 * cannot be read.
 */
bool disk_log_judge(struct disk_log *log, uint64_t promised, struct disk_verdict *verdict);

#endif
