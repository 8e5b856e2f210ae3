/* A log on a file or block device, opened; and what a look over the whole of it says. */
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
    uint64_t flushed; /* the highest record that is known to have been flushed, from the log itself or from the caller */
    uint64_t errors;  /* places that do not hold what they must */
};

/* Opens `log->path`, directly if that can be, and finds its size. Says why if it cannot. */
bool disk_log_open(struct disk_log *log, int flags);
/* Reads the header; false if there is none, or one that speaks of more slots than the file has. */
bool disk_log_header(struct disk_log *log);
/* Reads the whole log and judges every slot, given that record `promised` was flushed. False if it cannot be read. */
bool disk_log_judge(struct disk_log *log, uint64_t promised, struct disk_verdict *verdict);

#endif
