/* Addresses as text: PROVIDER/HOST:PORT#INCARNATION for IPv4, else PROVIDER/HEX#INCARNATION. The provider's name is in it
 * because an address of one means nothing to another; of a layered one ("tcp;ofi_rxm") the core name is enough. */
#include "efa_int.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>

static size_t provider_name(const fe_dom *d, char *out, size_t cap) {
    const char *p = d->info->fabric_attr->prov_name;
    /* "tcp;ofi_rxm" and the native "tcp" do not understand each other: '+' keeps the address free of ';' */
    size_t n = 0;
    for (; p[n] && n + 1 < cap; n++) out[n] = (char)(p[n] == ';' ? '+' : p[n]);
    out[n] = 0;
    return n;
}

int fe_address_text(const fe_dom *d, const uint8_t *name, uint32_t len, uint64_t incarnation, char *buf, size_t cap) {
    char prov[64], host[64];
    provider_name(d, prov, sizeof prov);
    unsigned long long inc = incarnation;
    int n;
    if (d->info->addr_format == FI_SOCKADDR_IN && len == sizeof(struct sockaddr_in)) {
        struct sockaddr_in a;
        memcpy(&a, name, sizeof a);
        inet_ntop(AF_INET, &a.sin_addr, host, sizeof host);
        n = snprintf(buf, cap, "%s/%s:%u#%llx", prov, host, ntohs(a.sin_port), inc);
    } else {
        char hex[2 * FAB_CONTACT_ADDR + 1];
        hex[0] = 0;
        for (uint32_t i = 0; i < len && i < FAB_CONTACT_ADDR; i++) snprintf(hex + (size_t)2 * i, 3, "%02x", name[i]);
        n = snprintf(buf, cap, "%s/%s#%llx", prov, hex, inc);
    }
    return n < 0 || (size_t)n >= cap ? -ENOSPC : n;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static int parse_ipv4(const char *text, uint8_t *name, uint32_t *len) {
    char host[64];
    struct sockaddr_in a = {.sin_family = AF_INET};
    const char *colon = strchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : sizeof host;
    if (n >= sizeof host || colon[1] < '0' || colon[1] > '9') return -EINVAL;
    memcpy(host, text, n);
    host[n] = 0;
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (*end || !port || port > 65535 || inet_pton(AF_INET, host, &a.sin_addr) != 1) return -EINVAL;
    a.sin_port = htons((uint16_t)port);
    memcpy(name, &a, sizeof a);
    *len = sizeof a;
    return 0;
}

int fe_address_parse(const fe_dom *d, const char *text, size_t len, uint8_t *name, uint32_t *name_len, uint64_t *inc) {
    char t[256], prov[64];
    if (!len || len >= sizeof t) return -EINVAL;
    memcpy(t, text, len);
    t[len] = 0;
    char *slash = strchr(t, '/'), *hash = strrchr(t, '#');
    if (!slash || !hash || hash < slash || !hash[1] || strlen(hash + 1) > 16) return -EINVAL;
    *slash = *hash = 0;
    provider_name(d, prov, sizeof prov);
    if (strcmp(prov, t) != 0) return -EPROTONOSUPPORT;
    *inc = 0;
    for (const char *c = hash + 1; *c; c++) {
        int v = hex_digit(*c);
        if (v < 0) return -EINVAL;
        *inc = *inc << 4 | (uint64_t)v;
    }
    if (!*inc) return -EINVAL;
    const char *body = slash + 1;
    if (d->info->addr_format == FI_SOCKADDR_IN) return parse_ipv4(body, name, name_len);
    size_t n = strlen(body);
    if (!n || n % 2 || n / 2 > FAB_CONTACT_ADDR) return -EINVAL;
    for (size_t i = 0; i < n / 2; i++) {
        int hi = hex_digit(body[2 * i]), lo = hex_digit(body[2 * i + 1]);
        if (hi < 0 || lo < 0) return -EINVAL;
        name[i] = (uint8_t)(hi << 4 | lo);
    }
    *name_len = (uint32_t)(n / 2);
    return 0;
}

void fe_address_explain(const fe_dom *d, const char *text, size_t len, int rc) {
    char peer[FE_ADDRESS], prov[64], why[FE_WORDS];
    snprintf(peer, sizeof peer, "%.*s", (int)(len < sizeof peer ? len : sizeof peer), text);
    provider_name(d, prov, sizeof prov);
    if (rc == -EPROTONOSUPPORT)
        snprintf(why, sizeof why,
                 "this engine is on provider %s, that address is of %.*s: --provider or FABRIC_EFA_PROVIDER, the same "
                 "on both sides",
                 prov, (int)strcspn(peer, "/"), peer);
    else snprintf(why, sizeof why, "that is no address of provider %s, which look like %.200s", prov, d->address);
    fe_words_keep(d->address, peer, rc, why);
}

/* shm's addresses are fi_shm://PID:USER:NUMBER. Two endpoints of one process that know each other bring it down: of 1.17
 * once one of them is closed, of 2.5 at once (docs/efa.md). Returns 0 for one of another process. */
int fe_address_apart(const fe_dom *d, const char *text, size_t text_len, const uint8_t *name, uint32_t name_len) {
    char peer[FE_ADDRESS];
    uint32_t n = 0;
    for (int colons = 0; n < name_len && n < d->name_len && colons < 2; n++) {
        if (name[n] != d->name[n]) return 0;
        colons += name[n] == ':';
    }
    if (!n || name[n - 1] != ':') return 0;
    snprintf(peer, sizeof peer, "%.*s", (int)(text_len < sizeof peer ? text_len : sizeof peer), text);
    fe_words_keep(
        d->address, peer, -EOPNOTSUPP,
        "over shm two engines of one process cannot talk to each other, libfabric's provider would crash: put "
        "them into processes of their own, or use provider tcp or backend local");
    return -EOPNOTSUPP;
}
