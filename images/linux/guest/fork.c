/*
 * The fork checker: waits until the kernel reports that this machine is one of several that resumed
 * from the same checkpoint (VMGenID). It then prints random bytes from the kernel, which must
 * differ between the machines.
 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Largest size of a record of /dev/kmsg; a read returns one record. */
enum { RECORD_BYTES = 8192 };

int fork_main(int words, char **word)
{
    if (!options_read("fork", words, word, NULL, 0))
        return EXIT_USAGE;
    int log = open("/dev/kmsg", O_RDONLY | O_CLOEXEC);
    if (log < 0 || lseek(log, 0, SEEK_END) < 0) {
        say("check fork: errors=1 /dev/kmsg: %s", strerror(errno));
        return EXIT_FAILED;
    }
    say("check fork: ready");
    for (;;) {
        static char record[RECORD_BYTES + 1];
        ssize_t length = read(log, record, RECORD_BYTES);
        /* A record that was overwritten before it was read is not the end. */
        if (length < 0 && (errno == EPIPE || errno == EINTR))
            continue;
        if (length <= 0) {
            say("check fork: errors=1 reading /dev/kmsg: %s",
                length < 0 ? strerror(errno) : "it ended");
            return EXIT_FAILED;
        }
        record[length] = '\0';
        if (!strstr(record, "virtual machine fork"))
            continue;
        uint64_t random[2];
        if (getrandom(random, sizeof random, 0) != sizeof random) {
            say("check fork: errors=1 getrandom: %s", strerror(errno));
            return EXIT_FAILED;
        }
        say("check fork: reseeded random=<%016" PRIx64 "%016" PRIx64 ">", random[0], random[1]);
    }
}
