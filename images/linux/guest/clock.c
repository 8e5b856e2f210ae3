/*
 * The clock checker: reads three clocks at every tick, and records the longest gap between ticks
 * and every backward step.
 *
 * It moves to another processor each period, so that clocks that differ between vCPUs show as a
 * backward step.
 */
#include "check.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MONOTONIC, REALTIME, BOOTTIME, CLOCKS };

struct watch {
    uint64_t last[CLOCKS];
    uint64_t ticks, gap, longest_gap, back;
    /*
     * Largest movement of CLOCK_REALTIME against CLOCK_MONOTONIC in one tick, in either direction.
     */
    uint64_t longest_step;
};

static void clocks_read(uint64_t clock[CLOCKS])
{
    static const int id[CLOCKS] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME};
    for (int i = 0; i < CLOCKS; i++)
        clock[i] = clock_ns(id[i]);
}

static uint64_t distance(uint64_t a, uint64_t b)
{
    return a < b ? b - a : a - b;
}

/*
 * Compares the clocks with the last reading. Gaps count only if the checker did nothing but sleep
 * between the two.
 */
static void watch_read(struct watch *watch, bool slept)
{
    static const char *const name[CLOCKS] = {"CLOCK_MONOTONIC", "CLOCK_REALTIME", "CLOCK_BOOTTIME"};
    uint64_t now[CLOCKS];
    clocks_read(now);
    for (int i = 0; i < CLOCKS; i++) {
        if (now[i] < watch->last[i] && watch->back++ < ERRORS_DESCRIBED)
            say("check clock: error: %s went back by %" PRIu64 " ns", name[i],
                watch->last[i] - now[i]);
    }
    uint64_t gap =
        now[MONOTONIC] < watch->last[MONOTONIC] ? 0 : now[MONOTONIC] - watch->last[MONOTONIC];
    uint64_t step = distance(now[REALTIME] - watch->last[REALTIME], gap);
    if (slept && gap > watch->gap)
        watch->gap = gap;
    if (watch->gap > watch->longest_gap)
        watch->longest_gap = watch->gap;
    if (step > watch->longest_step && now[REALTIME] >= watch->last[REALTIME])
        watch->longest_step = step;
    memcpy(watch->last, now, sizeof now);
}

/*
 * Moves to the next processor after `*at` that this process may use; stays where it is if that
 * fails.
 */
static void next_processor(const cpu_set_t *usable, int *at)
{
    for (int i = 0; i < CPU_SETSIZE; i++) {
        *at = (*at + 1) % CPU_SETSIZE;
        if (CPU_ISSET(*at, usable))
            break;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(*at, &one);
    (void)sched_setaffinity(0, sizeof one, &one);
}

static void source_name(char *name, size_t bytes)
{
    FILE *file = fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "re");
    if (!file || !fgets(name, (int)bytes, file))
        snprintf(name, bytes, "unknown");
    name[strcspn(name, "\n")] = '\0';
    if (file)
        fclose(file);
}

int clock_main(int words, char **word)
{
    uint64_t tick = 20, every = 1000;
    const struct option table[] = {{"tick", OPTION_DURATION, &tick},
                                   {"every", OPTION_DURATION, &every}};
    if (!options_read("clock", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;

    cpu_set_t usable;
    bool moving = sched_getaffinity(0, sizeof usable, &usable) == 0 && CPU_COUNT(&usable) > 1;
    int processor = -1;
    char source[32];
    source_name(source, sizeof source);
    say("check clock: ready source=%s", source);
    struct watch watch = {0};
    clocks_read(watch.last);
    for (uint64_t due = now_ns() + every * 1000000;; watch.ticks++) {
        sleep_ms(tick);
        watch_read(&watch, true);
        if (!period_over(&due, every))
            continue;
        say("check clock: ticks=%" PRIu64 " gap_ms=%" PRIu64 " longest_gap_ms=%" PRIu64
            " realtime_step_ms=%" PRIu64 " back=%" PRIu64,
            watch.ticks, watch.gap / 1000000, watch.longest_gap / 1000000,
            watch.longest_step / 1000000, watch.back);
        watch.gap = 0;
        if (moving)
            next_processor(&usable, &processor);
        watch_read(&watch, false);
    }
}
