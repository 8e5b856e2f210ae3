/* The ioctls that give an interface its address and its route. */
#include "network.h"

#include "check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void set_address(struct sockaddr *to, struct in_addr address)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr = address};
    memcpy(to, &in, sizeof in);
}

/* Makes one request to the kernel; false, after printing the error, if it is refused. */
static bool ask(int fd, unsigned long request, void *argument, const char *interface,
                const char *what)
{
    if (ioctl(fd, (int)request, argument) == 0)
        return true;
    say("driftline-linux: %s: cannot set %s: %s", interface, what, strerror(errno));
    return false;
}

static bool interface_up(int fd, const char *interface)
{
    struct ifreq request = {.ifr_flags = IFF_UP | IFF_RUNNING};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
    return ask(fd, SIOCSIFFLAGS, &request, interface, "it up");
}

void network_loopback(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    interface_up(fd, "lo");
    close(fd);
}

void network_start(const char *interface, char *address, const char *gateway)
{
    struct in_addr own, router = {0};
    uint64_t bits = 24;
    char *slash = strchr(address, '/');
    if (slash)
        *slash = '\0';
    if (inet_pton(AF_INET, address, &own) != 1 ||
        (slash && (!number_read(slash + 1, OPTION_NUMBER, &bits) || bits == 0 || bits > 32)) ||
        (gateway && inet_pton(AF_INET, gateway, &router) != 1)) {
        say("driftline-linux: driftline.ip or driftline.gw is not an address like 10.0.0.2/24");
        return;
    }
    if (if_nametoindex(interface) == 0) {
        say("driftline-linux: there is no %s", interface);
        return;
    }
    struct in_addr mask = {.s_addr = htonl((uint32_t)(UINT64_C(0xffffffff) << (32 - bits)))};
    struct ifreq request = {0};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    set_address(&request.ifr_addr, own);
    bool set = ask(fd, SIOCSIFADDR, &request, interface, "its address");
    set_address(&request.ifr_netmask, mask);
    set = set && ask(fd, SIOCSIFNETMASK, &request, interface, "its netmask") &&
          interface_up(fd, interface);
    if (set && gateway) {
        struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
        set_address(&route.rt_dst, (struct in_addr){0});
        set_address(&route.rt_genmask, (struct in_addr){0});
        set_address(&route.rt_gateway, router);
        ask(fd, SIOCADDRT, &route, interface, "its default route");
    }
    close(fd);
}
