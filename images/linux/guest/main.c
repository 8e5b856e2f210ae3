/*
 * One binary for all programs: /init as process 1, otherwise the program that the first word names.
 */
#include "check.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int words, char **word)
{
    static const struct {
        const char *name, *options;
        int (*main)(int, char **);
    } program[] = {
        {"mem", "[size=16M] [rate=32M] [every=1s]", mem_main},
        {"disk", "[path=/dev/vda] [size=16M] [pause=100ms] [every=1s]", disk_main},
        {"disk-verify", "[path=/dev/vda] [at-least=N]", disk_verify_main},
        {"tcp", "[port=7] [every=1s]", tcp_main},
        {"echo",
         "[addr=10.0.0.2 | vsock=SOCKET] [port=7] [interval=20ms] [run=0s] [connect=60s] "
         "[drain=30s] [window=4096] [every=1s]",
         tcp_client_main},
        {"clock", "[tick=20ms] [every=1s]", clock_main},
        {"fork", "", fork_main},
    };
    if (getpid() == 1)
        return init_main();
    for (size_t i = 0; words > 1 && i < sizeof program / sizeof *program; i++) {
        if (strcmp(word[1], program[i].name) == 0)
            return program[i].main(words - 2, word + 2);
    }
    fprintf(stderr, "usage:\n");
    for (size_t i = 0; i < sizeof program / sizeof *program; i++)
        fprintf(stderr, "  driftline-check %s %s\n", program[i].name, program[i].options);
    return EXIT_USAGE;
}
