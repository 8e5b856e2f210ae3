/*
 * The client of the echo: sends numbered messages at a fixed interval, and checks that each comes
 * back once, complete and in order.
 *
 * Silence is the time between two answers, starting with the first one: the pause that a user at
 * the other end of the connection would notice. The time before the first answer belongs to the
 * guest's boot.
 */
#include "check.h"
#include "message.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Default limit of unanswered messages, at which the client waits instead of filling the socket. */
enum { WINDOW = 4096 };

struct client {
    int fd;
    uint64_t nonce, sent, received, window;
    uint64_t last_answer_ns, silence_ns, longest_silence_ns;
    size_t out_left, in_filled; /* of the message being sent, of the one being received */
    unsigned char out[MESSAGE_BYTES], in[MESSAGE_BYTES];
};

static volatile sig_atomic_t told_to_end;

static void end_told(int signal)
{
    (void)signal;
    told_to_end = 1;
}

static int connect_tcp(const char *address, uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (inet_pton(AF_INET, address, &to.sin_addr) != 1) {
        errno = EINVAL;
        return -1;
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

/*
 * Connects through a vsock device's unix socket: requests the guest's port by name, and reads a
 * one-line answer.
 */
static int connect_vsock(const char *path, uint16_t port)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof to.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(to.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        dprintf(fd, "CONNECT %u\n", port) < 0) {
        close(fd);
        return -1;
    }
    char answer[32];
    size_t length = 0;
    while (length < sizeof answer && read(fd, answer + length, 1) == 1) {
        if (answer[length++] == '\n' && length > 3 && memcmp(answer, "OK ", 3) == 0)
            return fd;
    }
    close(fd);
    errno = ECONNREFUSED;
    return -1;
}

/* Connects, and retries until `limit_ms` has passed, because the guest may still be booting. */
static int connect_within(const char *address, const char *vsock, uint16_t port, uint64_t limit_ms)
{
    uint64_t limit = now_ns() + limit_ms * 1000000;
    for (;;) {
        int fd = vsock ? connect_vsock(vsock, port) : connect_tcp(address, port);
        if (fd >= 0)
            return fd;
        if (now_ns() >= limit || told_to_end || errno == EINVAL || errno == ENAMETOOLONG)
            return -1;
        sleep_ms(100);
    }
}

/* Sends the messages that are due; false if the connection has ended. */
static bool client_send(struct client *client, bool due)
{
    if (client->out_left == 0) {
        if (!due)
            return true;
        message_encode(client->out,
                       &(struct message){.number = client->sent++, .nonce = client->nonce});
        client->out_left = MESSAGE_BYTES;
    }
    ssize_t sent = send(client->fd, client->out + MESSAGE_BYTES - client->out_left,
                        client->out_left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0)
        return errno == EAGAIN || errno == EINTR;
    client->out_left -= (size_t)sent;
    return true;
}

/*
 * Records the time since the last answer, whether an answer has just arrived or is still missing.
 */
static void silence_count(struct client *client, uint64_t now)
{
    if (client->received == 0)
        return;
    uint64_t silence = now - client->last_answer_ns;
    if (silence > client->silence_ns)
        client->silence_ns = silence;
    if (silence > client->longest_silence_ns)
        client->longest_silence_ns = silence;
}

static const char *answer_judge(struct client *client)
{
    struct message message;
    if (!message_decode(client->in, &message))
        return "is broken";
    if (message.nonce != client->nonce)
        return "belongs to another connection";
    if (message.number != client->received)
        return message.number < client->received ? "came twice" : "overtook others";
    client->received++;
    return NULL;
}

/* Receives answers; false if the connection has ended or an answer is wrong. */
static bool client_receive(struct client *client)
{
    for (;;) {
        ssize_t got = recv(client->fd, client->in + client->in_filled,
                           MESSAGE_BYTES - client->in_filled, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return true;
        if (got <= 0) {
            say("check echo: error: the connection ended: %s",
                got == 0 ? "closed by the other side" : strerror(errno));
            return false;
        }
        uint64_t now = now_ns();
        silence_count(client, now);
        client->last_answer_ns = now;
        client->in_filled += (size_t)got;
        if (client->in_filled < MESSAGE_BYTES)
            continue;
        client->in_filled = 0;
        const char *wrong = answer_judge(client);
        if (wrong) {
            say("check echo: error: answer %" PRIu64 " %s", client->received, wrong);
            return false;
        }
    }
}

/* Runs until the time has passed and every message is answered. */
static bool client_run(struct client *client, uint64_t interval_ms, uint64_t run_ms, uint64_t every,
                       uint64_t drain_ms)
{
    uint64_t start = now_ns(), next = start, due = start + every * 1000000, end = 0;
    for (;;) {
        uint64_t now = now_ns();
        if (!end && (told_to_end || (run_ms && now - start >= run_ms * 1000000)))
            end = now;
        bool unanswered = client->received < client->sent;
        if (end && !unanswered)
            return true;
        if (end && now - end >= drain_ms * 1000000) {
            silence_count(client, now);
            say("check echo: error: %" PRIu64 " messages are without an answer after %" PRIu64
                " ms",
                client->sent - client->received, drain_ms);
            return false;
        }
        bool message_due = !end && now >= next && client->sent - client->received < client->window;
        if (message_due) {
            next += interval_ms * 1000000;
            if (next <= now)
                next = now + interval_ms * 1000000;
        }
        if (!client_send(client, message_due)) {
            say("check echo: error: cannot send message %" PRIu64 ": %s", client->sent - 1,
                strerror(errno));
            return false;
        }
        if (period_over(&due, every)) {
            if (unanswered)
                silence_count(client, now);
            say("check echo: sent=%" PRIu64 " received=%" PRIu64 " silence_ms=%" PRIu64
                " longest_silence_ms=%" PRIu64,
                client->sent, client->received, client->silence_ns / 1000000,
                client->longest_silence_ns / 1000000);
            client->silence_ns = 0;
        }
        struct pollfd socket = {.fd = client->fd,
                                .events = (short)(POLLIN | (client->out_left ? POLLOUT : 0))};
        now = now_ns();
        int wait = !end && next > now ? (int)((next - now) / 1000000) + 1 : 10;
        if (poll(&socket, 1, wait) > 0 && !client_receive(client))
            return false;
    }
}

int tcp_client_main(int words, char **word)
{
    const char *address = "10.0.0.2", *vsock = NULL;
    uint64_t port = 7, interval = 20, run = 0, every = 1000, connect_ms = 60000, drain = 30000,
             window = WINDOW;
    const struct option table[] = {
        {"addr", OPTION_TEXT, &address},
        {"vsock", OPTION_TEXT, &vsock},
        {"port", OPTION_NUMBER, &port},
        {"interval", OPTION_DURATION, &interval},
        {"run", OPTION_DURATION, &run},
        {"every", OPTION_DURATION, &every},
        {"connect", OPTION_DURATION, &connect_ms},
        {"drain", OPTION_DURATION, &drain},
        {"window", OPTION_NUMBER, &window},
    };
    if (!options_read("echo", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;
    if (port == 0 || port > UINT16_MAX || interval == 0 || interval > 60000 || window == 0 ||
        window > WINDOW) {
        fprintf(stderr,
                "check echo: port=%" PRIu64 ", interval=%" PRIu64 " or window=%" PRIu64
                " is out of range\n",
                port, interval, window);
        return EXIT_USAGE;
    }
    struct sigaction ending = {.sa_handler = end_told};
    sigaction(SIGINT, &ending, NULL);
    sigaction(SIGTERM, &ending, NULL);

    struct client client = {.window = window,
                            .nonce = scramble(now_ns() ^ (uint64_t)getpid() << 48)};
    client.fd = connect_within(address, vsock, (uint16_t)port, connect_ms);
    if (client.fd < 0) {
        say("check echo: cannot connect to %s port %" PRIu64 ": %s", vsock ? vsock : address, port,
            strerror(errno));
        return EXIT_FAILED;
    }
    bool intact = client_run(&client, interval, run, every, drain);
    say("check echo: done sent=%" PRIu64 " received=%" PRIu64 " longest_silence_ms=%" PRIu64
        " intact=%s",
        client.sent, client.received, client.longest_silence_ns / 1000000, intact ? "yes" : "no");
    return intact ? EXIT_PASSED : EXIT_FAILED;
}
