/*
 * The memory checker: rewrites pages of its own in passes, and reads each page back before it
 * writes it again.
 *
 * The generation of a page is the pass that wrote it, so one number in a register determines the
 * content of every page. A frame that lost a write, or that reverted to older content, is detected
 * within a pass.
 */
#include "check.h"
#include "page.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>

/* Number of sleeps a second, because sleeps are expensive where ring 0 is emulated. */
enum { SLEEPS_A_SECOND = 20 };
enum { HUGE_PAGE_BYTES = 2 << 20 };

static uint64_t *pages_map(uint64_t bytes)
{
    char *map = mmap(NULL, bytes + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    uintptr_t aligned = ((uintptr_t)map + HUGE_PAGE_BYTES - 1) & ~(uintptr_t)(HUGE_PAGE_BYTES - 1);
    /*
     * Huge pages mean fewer first accesses, each of which is a slow fault. A kernel without huge
     * pages refuses, which is harmless.
     */
    (void)madvise((void *)aligned, bytes, MADV_HUGEPAGE);
    return (uint64_t *)aligned;
}

/*
 * Every pass visits the pages in another order. An odd stride reaches each page of a power of two
 * once.
 */
static uint64_t page_at(uint64_t step, uint64_t pass, uint64_t pages)
{
    uint64_t stride = scramble(pass) | 1;
    return (step * stride + pass) & (pages - 1);
}

static uint64_t power_of_two_up_to(uint64_t n)
{
    uint64_t power = 1;
    while (power <= n / 2)
        power *= 2;
    return power;
}

int mem_main(int words, char **word)
{
    uint64_t size = 16 << 20, rate = 32 << 20, every = 1000;
    const struct option table[] = {{"size", OPTION_SIZE, &size},
                                   {"rate", OPTION_SIZE, &rate},
                                   {"every", OPTION_DURATION, &every}};
    if (!options_read("mem", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;
    if (size < PAGE_BYTES || size > 1ull << 40) {
        fprintf(stderr, "check mem: size=%" PRIu64 " is not between one page and 1024G\n", size);
        return EXIT_USAGE;
    }
    uint64_t pages = power_of_two_up_to(size / PAGE_BYTES);
    uint64_t *memory = pages_map(pages * PAGE_BYTES);
    if (!memory) {
        say("check mem: cannot map %" PRIu64 " pages", pages);
        return EXIT_FAILED;
    }
    for (uint64_t page = 0; page < pages; page++)
        page_write(memory + page * PAGE_WORDS, page, 0);
    say("check mem: ready pages=%" PRIu64, pages);

    /* A rate of 0 means no limit: the clock is read about as often, and there are no sleeps. */
    uint64_t burst = rate ? rate / SLEEPS_A_SECOND / PAGE_BYTES : 16384;
    if (burst == 0)
        burst = 1;
    uint64_t errors = 0, burst_left = burst, due = now_ns(), wake = due;
    for (uint64_t pass = 1;; pass++) {
        for (uint64_t step = 0; step < pages; step++) {
            uint64_t number = page_at(step, pass, pages);
            uint64_t *page = memory + number * PAGE_WORDS;
            enum page_verdict verdict = page_judge(page, number, pass - 1);
            if (verdict != PAGE_GOOD && errors++ < ERRORS_DESCRIBED)
                say("check mem: error: page %" PRIu64 " of pass %" PRIu64 " is %s: number %" PRIu64
                    ", generation %" PRIu64,
                    number, pass - 1, page_verdict_text(verdict), page[0], page[1]);
            page_write(page, number, pass);
            if (--burst_left > 0)
                continue;
            burst_left = burst;
            if (period_over(&due, every))
                say("check mem: passes=%" PRIu64 " errors=%" PRIu64 " pages=%" PRIu64, pass - 1,
                    errors, pages);
            if (rate) {
                /* After a pause of the guest the missed passes are not made up for. */
                uint64_t now = now_ns();
                wake += burst * PAGE_BYTES * 1000 / rate * 1000000;
                if (wake < now)
                    wake = now;
                sleep_until(wake);
            }
        }
    }
}
