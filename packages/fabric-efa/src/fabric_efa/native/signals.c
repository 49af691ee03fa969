/* Libraries below libfabric (those of psm among them) install signal handlers of their own when they are loaded or first
 * asked: Ctrl-C would then end the program with exit code 1 and a dump in the working directory. What a signal does is
 * the program's to say: handlers that appear meanwhile are taken out again. */
#include "efa_int.h"

void fe_signals_keep(fe_signals *before) {
    for (int s = 1; s < FE_SIGNALS; s++) before->valid[s] = sigaction(s, NULL, &before->action[s]) == 0;
}

void fe_signals_restore(const fe_signals *before) {
    for (int s = 1; s < FE_SIGNALS; s++) {
        struct sigaction now;
        if (!before->valid[s] || sigaction(s, NULL, &now)) continue;
        /* one union: either kind of handler has the same address in it */
        if (now.sa_sigaction != before->action[s].sa_sigaction) sigaction(s, &before->action[s], NULL);
    }
}
