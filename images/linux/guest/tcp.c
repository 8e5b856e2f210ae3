/*
 * The server of the echo: returns every message, and checks that each connection's messages arrive
 * complete and in order. It listens on TCP and, where the guest has it, on vsock at the same port.
 *
 * It has one thread and one poll loop. A connection owns a buffer of a few messages and is not read
 * while that buffer is full.
 */
#include "check.h"
#include "message.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/vm_sockets.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONNECTIONS = 16, LISTENERS = 2, BUFFER_BYTES = 16 * MESSAGE_BYTES };

struct connection {
    int fd; /* -1: this place is free */
    struct message expected;
    /* Bytes of the buffer: received, checked, returned. sent <= checked <= filled. */
    size_t filled, checked, sent;
    unsigned char buffer[BUFFER_BYTES];
};

struct server {
    struct pollfd poll[LISTENERS + CONNECTIONS];
    int listeners;
    struct connection connection[CONNECTIONS];
    uint64_t open, messages, errors, strangers;
};

static void listen_on(struct server *server, int fd, const struct sockaddr *address,
                      socklen_t length, const char *what)
{
    int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, address, length) != 0 || listen(fd, CONNECTIONS) != 0) {
        say("check tcp: cannot listen on %s: %s", what, strerror(errno));
        close(fd);
        return;
    }
    server->poll[server->listeners++] = (struct pollfd){.fd = fd, .events = POLLIN};
}

static void server_listen(struct server *server, uint16_t port)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0)
        listen_on(server, fd, (struct sockaddr *)&any, sizeof any, "TCP");
    /* A kernel without vsock, or a machine without the device, has only TCP. */
    struct sockaddr_vm any_vm = {
        .svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
    fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0)
        listen_on(server, fd, (struct sockaddr *)&any_vm, sizeof any_vm, "vsock");
}

static void connection_close(struct server *server, struct connection *connection)
{
    close(connection->fd);
    connection->fd = -1;
    server->open--;
}

static void connection_accept(struct server *server, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    for (int i = 0; i < CONNECTIONS; i++) {
        struct connection *connection = &server->connection[i];
        if (connection->fd >= 0)
            continue;
        int yes = 1;
        /* Vsock has no such option. */
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        *connection = (struct connection){.fd = fd};
        server->open++;
        return;
    }
    close(fd);
}

/*
 * Checks the messages that have arrived completely. False if the connection uses another protocol.
 */
static bool connection_judge(struct server *server, struct connection *connection)
{
    for (; connection->filled - connection->checked >= MESSAGE_BYTES;
         connection->checked += MESSAGE_BYTES) {
        struct message message;
        bool whole = message_decode(connection->buffer + connection->checked, &message);
        struct message *expected = &connection->expected;
        if (!whole && expected->number == 0) {
            server->strangers++;
            return false;
        }
        if (expected->number == 0)
            expected->nonce = message.nonce;
        if (!whole || message.nonce != expected->nonce || message.number != expected->number) {
            if (server->errors++ < ERRORS_DESCRIBED)
                say("check tcp: error: message %" PRIu64 " arrived as %s %" PRIu64,
                    expected->number, whole ? "number" : "a broken", message.number);
            return false;
        }
        expected->number++;
        server->messages++;
    }
    return true;
}

/* Receives and sends as much as possible; false when the connection has ended. */
static bool connection_turn(struct server *server, struct connection *connection, short ready)
{
    if (ready & (POLLIN | POLLHUP | POLLERR) && connection->filled < BUFFER_BYTES) {
        ssize_t got = read(connection->fd, connection->buffer + connection->filled,
                           BUFFER_BYTES - connection->filled);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        if (got > 0)
            connection->filled += (size_t)got;
        if (!connection_judge(server, connection))
            return false;
    }
    if (connection->sent < connection->checked) {
        ssize_t sent = send(connection->fd, connection->buffer + connection->sent,
                            connection->checked - connection->sent, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        if (sent > 0)
            connection->sent += (size_t)sent;
    }
    if (connection->sent == connection->checked) {
        connection->filled -= connection->checked;
        memmove(connection->buffer, connection->buffer + connection->checked, connection->filled);
        connection->checked = connection->sent = 0;
    }
    return true;
}

static void server_turn(struct server *server, uint64_t wait_ms)
{
    struct connection *polled[CONNECTIONS];
    int places = server->listeners;
    for (int i = 0; i < CONNECTIONS; i++) {
        struct connection *connection = &server->connection[i];
        if (connection->fd < 0)
            continue;
        short events = connection->filled < BUFFER_BYTES ? POLLIN : 0;
        if (connection->sent < connection->checked)
            events |= POLLOUT;
        polled[places - server->listeners] = connection;
        server->poll[places++] = (struct pollfd){.fd = connection->fd, .events = events};
    }
    if (poll(server->poll, (nfds_t)places, (int)wait_ms) <= 0)
        return;
    for (int i = server->listeners; i < places; i++) {
        struct connection *connection = polled[i - server->listeners];
        if (server->poll[i].revents &&
            !connection_turn(server, connection, server->poll[i].revents))
            connection_close(server, connection);
    }
    for (int i = 0; i < server->listeners; i++) {
        if (server->poll[i].revents)
            connection_accept(server, server->poll[i].fd);
    }
}

int tcp_main(int words, char **word)
{
    static struct server server;
    uint64_t port = 7, every = 1000;
    const struct option table[] = {{"port", OPTION_NUMBER, &port},
                                   {"every", OPTION_DURATION, &every}};
    if (!options_read("tcp", words, word, table, sizeof table / sizeof *table))
        return EXIT_USAGE;
    if (port == 0 || port > UINT16_MAX || every > INT32_MAX) {
        fprintf(stderr, "check tcp: port=%" PRIu64 " or every=%" PRIu64 " is out of range\n", port,
                every);
        return EXIT_USAGE;
    }
    for (int i = 0; i < CONNECTIONS; i++)
        server.connection[i].fd = -1;
    server_listen(&server, (uint16_t)port);
    if (server.listeners == 0)
        return EXIT_FAILED;
    say("check tcp: ready port=%" PRIu64 " listeners=%d", port, server.listeners);
    for (uint64_t due = now_ns();;) {
        if (period_over(&due, every))
            say("check tcp: connections=%" PRIu64 " messages=%" PRIu64 " errors=%" PRIu64
                " strangers=%" PRIu64,
                server.open, server.messages, server.errors, server.strangers);
        server_turn(&server, every);
    }
}
