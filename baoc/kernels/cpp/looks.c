/* Where the gradients of many parameters are, without making a Python object of each: see looks.py. */
#include <stdint.h>

typedef void *const *(*grad_of)(const void *);        /* c10::TensorImpl::grad() const; a tensor is a pointer */
typedef int32_t (*address_of)(const void *, void **); /* aoti_torch_get_data_ptr */

/* `objects` are Python's tensors, whose implementation stands `at` bytes from their beginning; `none` is the
   implementation of no tensor. `seen` gets an address for each, -1 where there is no gradient. Returns how many were
   seen: less than `num` if a gradient has no address. */
int64_t baoc_look(int64_t num, const char *const *objects, int64_t at, int64_t *seen, grad_of grad, address_of data,
                  const void *none) {
  for (int64_t i = 0; i < num; ++i) {
    void *const *tensor = grad(*(void *const *)(objects[i] + at));
    void *address = (void *)-1;
    if (*tensor != none && data(tensor, &address) != 0) return i;
    seen[i] = (int64_t)address;
  }
  return num;
}
