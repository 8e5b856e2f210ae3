/*
 * Shared by the guest's programs: options, report lines, clocks, randomness and checksums, and the
 * entry of each program.
 *
 * The binary `driftline-check` contains all programs. It runs as the guest's /init and, because it
 * is static, on the host as well.
 */
#ifndef DRIFTLINE_CHECK_H
#define DRIFTLINE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PAGE_BYTES = 4096, PAGE_WORDS = PAGE_BYTES / 8 };

/* Exit codes: 0 success, 1 a check failed, 2 wrong usage. */
enum { EXIT_PASSED = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* Number of errors that a checker describes before it only counts them. */
enum { ERRORS_DESCRIBED = 8 };

/*
 * One `key=value` option of a program. Sizes are bytes (K, M, G are powers of two), durations
 * milliseconds (`20ms`, `2s`).
 */
enum option_kind { OPTION_TEXT, OPTION_NUMBER, OPTION_SIZE, OPTION_DURATION };
struct option {
    const char *key;
    enum option_kind kind;
    void *value; /* const char ** for text, uint64_t * for the others */
};

/*
 * Fills `table` from the words `key=value`. Names a word that matches no option on stderr and
 * returns false.
 */
bool options_read(const char *who, int words, char **word, const struct option *table,
                  size_t options);

/*
 * Parses a number with the unit suffixes of `kind`; false if the text is anything else or does not
 * fit into 64 bits.
 */
bool number_read(const char *text, enum option_kind kind, uint64_t *value);

/*
 * Prints one whole line with one write, so that lines of several programs on one console are not
 * mixed.
 */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Returns the nanoseconds of CLOCK_MONOTONIC. */
uint64_t now_ns(void);
uint64_t clock_ns(int clock);
void sleep_ms(uint64_t ms);
/*
 * Sleeps until CLOCK_MONOTONIC reaches `deadline_ns`, through signals that do not end the program.
 */
void sleep_until(uint64_t deadline_ns);

/*
 * Returns whether the next status line is due; then advances `due_ns` by one period, skipping
 * periods that have passed.
 */
bool period_over(uint64_t *due_ns, uint64_t period_ms);

/* Scrambles 64 bits bijectively: similar inputs give dissimilar outputs. */
uint64_t scramble(uint64_t x);
/* Returns the next number of a generator whose entire state is `*state`. */
uint64_t random_next(uint64_t *state);

/* Returns the CRC-32C (Castagnoli) of `length` bytes, continuing `crc`; 0 to begin. */
uint32_t crc32c(uint32_t crc, const void *bytes, size_t length);

/* The programs. `words` are the arguments after the program's name. */
int init_main(void);
int mem_main(int words, char **word);
int disk_main(int words, char **word);
int disk_verify_main(int words, char **word);
int tcp_main(int words, char **word);
int tcp_client_main(int words, char **word);
int clock_main(int words, char **word);
int fork_main(int words, char **word);

#endif
