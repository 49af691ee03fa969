/* What is told about a run: the first violation, and the last lines of its trace. */
#include "sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

void sim_fail(sim_world *w, const char *checker, const char *format, ...) {
    if (w->failed) return; /* the first is the cause, what follows are its consequences */
    w->failed = true;
    int n = snprintf(w->violation, sizeof w->violation, "%s: at %.9f s: ", checker, (double)w->now / 1e9);
    va_list args;
    va_start(args, format);
    vsnprintf(w->violation + n, sizeof w->violation - (size_t)n, format, args);
    va_end(args);
}

static const char *name_of(uint32_t kind) {
    static const char *const events[] = {
        [SIM_EV_STEP] = "step",         [SIM_EV_TICK] = "tick",
        [SIM_EV_WR] = "request",        [SIM_EV_IMM] = "immediate",
        [SIM_EV_CONTACT] = "contact",   [SIM_EV_DATAGRAM] = "datagram",
        [SIM_EV_SUBMIT] = "submit",     [SIM_EV_CANCEL] = "cancel",
        [SIM_EV_EXPECT] = "expect",     [SIM_EV_XCANCEL] = "expect-cancel",
        [SIM_EV_FLOW] = "flow",         [SIM_EV_START] = "start",
        [SIM_EV_FAULT] = "fault",       [SIM_EV_HEAL] = "heal",
        [SIM_EV_RECV] = "receive-back", [SIM_TR_POST] = "posted",
        [SIM_TR_LAND] = "landed",       [SIM_TR_OP] = "completed",
        [SIM_TR_RAISED] = "raised",     [SIM_TR_SUBMITTED] = "submitted",
        [SIM_TR_ENDED] = "ended",       [SIM_TR_FIRED] = "fired",
        [SIM_TR_MESSAGE] = "message",   [SIM_TR_PEER] = "peer",
    };
    const char *name = kind < sizeof events / sizeof *events ? events[kind] : NULL;
    return name ? name : "?";
}

size_t sim_trace_text(const sim_world *w, char *out, size_t cap) {
    size_t used = 0;
    uint64_t first = w->lines > SIM_TRACE ? w->lines - SIM_TRACE : 0;
    if (cap) *out = 0;
    for (uint64_t i = first; i < w->lines; i++) {
        const sim_line *line = &w->trace[i % SIM_TRACE];
        int n = snprintf(out + used, cap - used, "%14.9f  node %" PRIu32 "  %-13s %10" PRIu32 " %" PRIx64 "\n",
                         (double)line->at / 1e9, line->node, name_of(line->kind), line->a, line->b);
        if (n < 0 || (size_t)n >= cap - used) break;
        used += (size_t)n;
    }
    return used;
}
