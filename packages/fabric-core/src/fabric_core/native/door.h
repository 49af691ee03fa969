/* Declarations only, read by cffi too. */
uint32_t fab_door_size(void);
const char *fab_door_name(uint32_t i);
void *fab_door(uint32_t i); /* a new function object */
