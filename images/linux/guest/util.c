/*
 * Options, report lines, clocks, randomness and checksums. Its only state is a table of checksums.
 */
#include "check.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static bool scale_of(const char *suffix, enum option_kind kind, uint64_t *scale)
{
    static const struct {
        const char *suffix;
        enum option_kind kind;
        uint64_t scale;
    } known[] = {
        {"", OPTION_NUMBER, 1},          {"", OPTION_SIZE, 1},
        {"K", OPTION_SIZE, 1ull << 10},  {"M", OPTION_SIZE, 1ull << 20},
        {"G", OPTION_SIZE, 1ull << 30},  {"ms", OPTION_DURATION, 1},
        {"s", OPTION_DURATION, 1000},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].kind == kind && strcmp(known[i].suffix, suffix) == 0) {
            *scale = known[i].scale;
            return true;
        }
    }
    return false;
}

bool number_read(const char *text, enum option_kind kind, uint64_t *value)
{
    /* strtoull accepts signs and spaces; a number here starts with a digit. */
    if (*text < '0' || *text > '9')
        return false;
    char *end;
    uint64_t scale;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno != 0 || !scale_of(end, kind, &scale) || number > UINT64_MAX / scale)
        return false;
    *value = number * scale;
    return true;
}

static bool option_read(const char *word, const struct option *table, size_t options)
{
    const char *equals = strchr(word, '=');
    for (size_t i = 0; equals && i < options; i++) {
        size_t length = (size_t)(equals - word);
        if (strlen(table[i].key) != length || memcmp(table[i].key, word, length) != 0)
            continue;
        if (table[i].kind == OPTION_TEXT) {
            *(const char **)table[i].value = equals + 1;
            return true;
        }
        return number_read(equals + 1, table[i].kind, table[i].value);
    }
    return false;
}

bool options_read(const char *who, int words, char **word, const struct option *table,
                  size_t options)
{
    static const char *const unit[] = {[OPTION_TEXT] = "",
                                       [OPTION_NUMBER] = "N",
                                       [OPTION_SIZE] = "N[K|M|G]",
                                       [OPTION_DURATION] = "N(ms|s)"};
    for (int w = 0; w < words; w++) {
        if (option_read(word[w], table, options))
            continue;
        fprintf(stderr, "check %s: '%s' is none of its options:", who, word[w]);
        for (size_t i = 0; i < options; i++)
            fprintf(stderr, " %s=%s", table[i].key,
                    table[i].kind == OPTION_TEXT ? "TEXT" : unit[table[i].kind]);
        fprintf(stderr, "\n");
        return false;
    }
    return true;
}

void say(const char *format, ...)
{
    char line[512];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line - 1, format, values);
    va_end(values);
    if (length < 0)
        return;
    if ((size_t)length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    for (int done = 0; done < length;) {
        ssize_t written = write(STDOUT_FILENO, line + done, (size_t)(length - done));
        if (written < 0 && errno != EINTR)
            return; /* The output is closed; the exit code still tells. */
        if (written > 0)
            done += (int)written;
    }
}

uint64_t clock_ns(int clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

uint64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

void sleep_until(uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000),
                             .tv_nsec = (long)(deadline_ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
}

void sleep_ms(uint64_t ms)
{
    sleep_until(now_ns() + ms * 1000000);
}

bool period_over(uint64_t *due_ns, uint64_t period_ms)
{
    uint64_t now = now_ns();
    if (now < *due_ns)
        return false;
    *due_ns += period_ms * 1000000;
    if (*due_ns <= now)
        *due_ns = now + period_ms * 1000000;
    return true;
}

uint64_t scramble(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

uint64_t random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15ull;
    return scramble(*state);
}

uint32_t crc32c(uint32_t crc, const void *bytes, size_t length)
{
    static uint32_t table[256];
    if (table[1] == 0) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t remainder = byte;
            for (int bit = 0; bit < 8; bit++)
                remainder = remainder >> 1 ^ (remainder & 1 ? 0x82f63b78u : 0);
            table[byte] = remainder;
        }
    }
    const unsigned char *at = bytes;
    crc = ~crc;
    while (length--)
        crc = crc >> 8 ^ table[(crc ^ *at++) & 0xff];
    return ~crc;
}
