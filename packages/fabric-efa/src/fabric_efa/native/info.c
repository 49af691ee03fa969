/* What is asked of a provider. Everything it may demand is offered in the hints; what it then demands is in the info, and
 * the rest of the code does what the info says: docs/efa.md has the table. */
#include "efa_int.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>

/* A NIC ends what it holds in bounded time, however its peer behaves; a socket or a shared ring does not. */
bool fe_hangs(const char *provider) {
    static const char *const sure[] = {"efa", "verbs", "cxi", "psm"};
    for (size_t i = 0; i < sizeof sure / sizeof *sure; i++)
        if (strncmp(provider, sure[i], strlen(sure[i])) == 0) return false;
    return true;
}

static struct fi_info *hints(const char *provider, const char *domain, bool rx_cq_data, bool hmem) {
    struct fi_info *h = fe_fi.dupinfo(NULL);
    if (!h) return NULL;
    bool efa = provider && strncmp(provider, "efa", 3) == 0;
    h->caps = FI_MSG | FI_SEND | FI_RECV | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | (hmem ? FI_HMEM : 0);
    h->mode = FI_CONTEXT | FI_CONTEXT2 | (rx_cq_data ? FI_RX_CQ_DATA : 0);
    h->ep_attr->type = FI_EP_RDM;
    h->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | (hmem ? FI_MR_HMEM : 0);
    /* EFA registers under locks of its own, which can take long: not under ours. The others are quick. */
    h->domain_attr->threading = efa ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
    h->domain_attr->control_progress = FI_PROGRESS_MANUAL; /* no thread of the provider's */
    h->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    h->domain_attr->resource_mgmt = FI_RM_ENABLED; /* a receiver that is not ready is waited for */
    h->domain_attr->av_type = FI_AV_TABLE;
    h->domain_attr->cq_data_size = 4;
    h->fabric_attr->prov_name = provider ? strdup(provider) : NULL;
    h->domain_attr->name = domain ? strdup(domain) : NULL;
    return h;
}

/* EFA turns unsolicited writes off when FI_RX_CQ_DATA is offered: without it first. GPU memory if a NIC can have it; the
 * providers in software would take their slower paths for its sake. */
int fe_info_get(const char *provider, const char *domain, const char *source, struct fi_info **out) {
    int rc = -ENODATA;
    if (!fe_fi.getinfo) return -ENOSYS;
    for (int k = 0; k < 4; k++) {
        bool hmem = k < 2 && provider && !fe_hangs(provider);
        struct fi_info *h = hints(provider, domain, k & 1, hmem);
        if (!h) return -ENOMEM;
        rc = fe_fi.getinfo(fe_fi.api, source, NULL, source ? FI_SOURCE : 0, h, out);
        fe_fi.freeinfo(h);
        if (!rc) return 0;
    }
    return rc;
}

static void copy(char *to, size_t cap, const char *from) { snprintf(to, cap, "%s", from ? from : ""); }

int fab_efa_probe(const char *provider, const char *source, fab_efa_nic *out, uint32_t cap) {
    struct fi_info *list = NULL;
    int rc = fe_info_get(provider, NULL, source, &list), n = 0;
    if (rc) return rc;
    for (const struct fi_info *i = list; i; i = i->next, n++) {
        if ((uint32_t)n >= cap) continue;
        fab_efa_nic *o = &out[n];
        memset(o, 0, sizeof *o);
        copy(o->provider, sizeof o->provider, i->fabric_attr->prov_name);
        copy(o->domain, sizeof o->domain, i->domain_attr->name);
        if (i->src_addr && i->addr_format == FI_SOCKADDR_IN)
            inet_ntop(AF_INET, &((struct sockaddr_in *)i->src_addr)->sin_addr, o->source, sizeof o->source);
        else if (i->src_addr && i->addr_format == FI_SOCKADDR_IN6)
            inet_ntop(AF_INET6, &((struct sockaddr_in6 *)i->src_addr)->sin6_addr, o->source, sizeof o->source);
        o->max_msg = i->ep_attr->max_msg_size;
        o->cq_data = (uint32_t)i->domain_attr->cq_data_size;
        o->inject = (uint32_t)i->tx_attr->inject_size;
        o->mr_mode = (uint32_t)i->domain_attr->mr_mode;
        o->version = i->fabric_attr->prov_version;
        if (!i->nic) continue;
        if (i->nic->link_attr) {
            o->speed = i->nic->link_attr->speed;
            o->mtu = (uint32_t)i->nic->link_attr->mtu;
            o->up = i->nic->link_attr->state == FI_LINK_UP ? 2 : i->nic->link_attr->state == FI_LINK_DOWN ? 1 : 0;
        }
        if (i->nic->bus_attr && i->nic->bus_attr->bus_type == FI_BUS_PCI) {
            struct fi_pci_attr p = i->nic->bus_attr->attr.pci;
            snprintf(o->pci, sizeof o->pci, "%04x:%02x:%02x.%x", p.domain_id, p.bus_id, p.device_id, p.function_id);
        }
    }
    fe_fi.freeinfo(list);
    return n;
}
