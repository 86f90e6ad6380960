/* Addresses of the gradients of many parameters, without a Python object for each: see grad_addresses.py. */
#include <stdint.h>

typedef void *const *(*grad_of)(const void *);        /* c10::TensorImpl::grad() const; a tensor is a pointer */
typedef int32_t (*address_of)(const void *, void **); /* aoti_torch_get_data_ptr */

/* `objects`: Python's tensor objects; each holds the pointer to its TensorImpl `at` bytes from its beginning. `none`:
   the TensorImpl of an undefined tensor. Writes one address for each into `seen`, -1 where there is no gradient.
   Returns the number of gradients read: less than `num` if one has no address (a sparse gradient). */
int64_t baoc_grad_addresses(int64_t num, const char *const *objects, int64_t at, int64_t *seen, grad_of grad,
                            address_of data, const void *none) {
  for (int64_t i = 0; i < num; ++i) {
    void *const *tensor = grad(*(void *const *)(objects[i] + at));
    void *address = (void *)-1;
    if (*tensor != none && data(tensor, &address) != 0) return i;
    seen[i] = (int64_t)address;
  }
  return num;
}
