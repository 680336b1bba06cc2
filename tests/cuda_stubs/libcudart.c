/* As much of the CUDA runtime as torch_memory_saver's preload library calls; "device" memory is this process's own,
 * in a file that another process can open (libcuda.c).
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };

int stub_add_plain(void *start, size_t size, int file);
size_t stub_remove_plain(void *start);

static __thread int current_device;

int cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

int cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

int cudaMalloc(void **pointer, size_t size) {
  int file = memfd_create("device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, size)) return cudaErrorMemoryAllocation;
  *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return *pointer == MAP_FAILED || stub_add_plain(*pointer, size, file) ? cudaErrorMemoryAllocation : cudaSuccess;
}

int cudaFree(void *pointer) {
  size_t size = stub_remove_plain(pointer);
  return size && !munmap(pointer, size) ? cudaSuccess : cudaErrorInvalidValue;
}

int cudaMallocHost(void **pointer, size_t size) { return (*pointer = malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation; }

int cudaFreeHost(void *pointer) {
  free(pointer);
  return cudaSuccess;
}

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
  memcpy(target, source, size);
  return cudaSuccess;
}

int cudaDeviceSynchronize(void) { return cudaSuccess; }

int cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = (size_t)1 << 34;
  return cudaSuccess;
}

const char *cudaGetErrorString(int error) { return error == cudaSuccess ? "no error" : "an error of the stub"; }
