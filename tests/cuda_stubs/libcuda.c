/* As much of the CUDA driver as torch_memory_saver's preload library and CUDA IPC call, over this process's own memory.
 *
 * Physical memory is a memfd, mapped where cuMemMap says: what was unmapped is inaccessible, and what is mapped anew is
 * zero, as on a device. What cudaMalloc gives is a memfd, too, that another process opens by its number, and the number
 * of this process: what is written at one end is there at the other. STUB_NOT_CAPABLE in the environment makes it memory
 * that cannot be shared, as torch's expandable segments are. Declared here as far as it is used (cuda.h, CUDA 13.0), so that no CUDA has to be installed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2 };
enum { CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_INVALID_HANDLE = 400 };
enum { IS_LEGACY_CUDA_IPC_CAPABLE = 10, MAPPED = 13 };
enum { GRANULARITY = 4096, RANGES = 65536 };

typedef struct {
  uintptr_t start;
  size_t size;
  int mapped;
  int plain;  /* from cudaMalloc itself */
  int file;   /* of what is plain */
  int opened; /* how many times another process's is open here */
} Range;

typedef struct {
  pid_t process;
  int file;
  size_t size;
  char rest[64 - sizeof(size_t) - 2 * sizeof(int)];
} Handle; /* CUipcMemHandle */

static Range ranges[RANGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Range *find(uintptr_t address) {
  for (int i = 0; i < RANGES; i++)
    if (ranges[i].size && ranges[i].start <= address && address < ranges[i].start + ranges[i].size) return &ranges[i];
  return NULL;
}

static int add(uintptr_t start, size_t size, int plain, int file) {
  for (int i = 0; i < RANGES; i++)
    if (!ranges[i].size) {
      ranges[i] = (Range){start, size, plain, plain, file, 0};
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

/* For libcudart.c. */
int stub_add_plain(void *start, size_t size, int file) {
  pthread_mutex_lock(&lock);
  int result = add((uintptr_t)start, size, 1, file);
  pthread_mutex_unlock(&lock);
  return result;
}

size_t stub_remove_plain(void *start) {
  pthread_mutex_lock(&lock);
  Range *range = find((uintptr_t)start);
  size_t size = range && range->plain && range->start == (uintptr_t)start ? range->size : 0;
  if (size) {
    range->size = 0;
    close(range->file);
  }
  pthread_mutex_unlock(&lock);
  return size;
}

/* For tests: how many allocations of other processes are open here. */
int stub_opened(void) {
  int count = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < RANGES; i++) count += ranges[i].size ? ranges[i].opened : 0;
  pthread_mutex_unlock(&lock);
  return count;
}

int cuCtxGetDevice(int *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 0;
  return CUDA_SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : "an error of the stub";
  return CUDA_SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
  *granularity = GRANULARITY;
  return CUDA_SUCCESS;
}

int cuMemCreate(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags) {
  int file = memfd_create("physical", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = file;
  return CUDA_SUCCESS;
}

int cuMemRelease(unsigned long long handle) { return close(handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

int cuMemAddressReserve(uintptr_t *start, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) {
  void *address = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *start = (uintptr_t)address;
  pthread_mutex_lock(&lock);
  int result = add(*start, size, 0, -1);
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemAddressFree(uintptr_t start, size_t size) {
  pthread_mutex_lock(&lock);
  Range *range = find(start);
  int result = range && !range->mapped && range->start == start ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) range->size = 0;
  pthread_mutex_unlock(&lock);
  return result == CUDA_SUCCESS && munmap((void *)start, size) ? CUDA_ERROR_INVALID_VALUE : result;
}

static int remap(uintptr_t start, size_t size, int mapped, int protection, int flags, int file) {
  pthread_mutex_lock(&lock);
  Range *range = find(start);
  int result = CUDA_ERROR_INVALID_VALUE;
  if (range && !range->plain && range->mapped != mapped &&
      mmap((void *)start, size, protection, flags | MAP_FIXED, file, 0) != MAP_FAILED) {
    range->mapped = mapped;
    result = CUDA_SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemMap(uintptr_t start, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
  return remap(start, size, 1, PROT_READ | PROT_WRITE, MAP_SHARED, handle);
}

int cuMemUnmap(uintptr_t start, size_t size) {
  return remap(start, size, 0, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}

int cuMemSetAccess(uintptr_t start, size_t size, const void *access, size_t count) { return CUDA_SUCCESS; }

int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(address);
  int result = range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  if (range && attribute == MAPPED)
    *(unsigned char *)value = range->mapped;
  else if (range && attribute == IS_LEGACY_CUDA_IPC_CAPABLE)
    *(unsigned char *)value = range->plain && !getenv("STUB_NOT_CAPABLE");
  else
    result = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemGetAddressRange_v2(uintptr_t *start, size_t *size, uintptr_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(address);
  if (range) *start = range->start, *size = range->size;
  pthread_mutex_unlock(&lock);
  return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cuIpcGetMemHandle(Handle *handle, uintptr_t start) {
  pthread_mutex_lock(&lock);
  Range *range = find(start);
  int result = range && range->plain && range->start == start ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  if (result == CUDA_SUCCESS) *handle = (Handle){.process = getpid(), .file = range->file, .size = range->size};
  pthread_mutex_unlock(&lock);
  return result;
}

int cuIpcOpenMemHandle_v2(uintptr_t *start, Handle handle, unsigned flags) {
  char path[64];
  if (handle.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
  void *address = mmap(NULL, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *start = (uintptr_t)address;
  pthread_mutex_lock(&lock);
  int result = add(*start, handle.size, 0, -1);
  Range *range = find(*start);
  if (range) range->mapped = range->opened = 1;
  pthread_mutex_unlock(&lock);
  return result;
}

int cuIpcCloseMemHandle(uintptr_t start) {
  pthread_mutex_lock(&lock);
  Range *range = find(start);
  size_t size = range && range->opened && range->start == start ? range->size : 0;
  if (size) range->size = 0;
  pthread_mutex_unlock(&lock);
  return size && !munmap((void *)start, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
