/* Stands in for libcudart.so where Dragon 0.15 counts GPUs: as many as FAKE_CUDA_DEVICES says (8), within
 * CUDA_VISIBLE_DEVICES as CUDA would. Dragon finds no GPU unless the library has every function that it may call; the
 * memory of all GPUs is the host's here, and no other process can open it. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

int cudaGetDeviceCount(int *count) {
    const char *all = getenv("FAKE_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = all ? atoi(all) : 8;
    if (visible) {
        *count = *visible != 0;
        while ((visible = strchr(visible, ',')))
            visible++, ++*count;
    }
    return SUCCESS;
}

int cudaGetDeviceProperties(void *properties, int device) {
    memset(properties, 0, 256);
    strcpy(properties, "NVIDIA H100");
    memset((char *)properties + 256, device + 1, 16); /* the UUID follows the name */
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(void *properties, int device) { return cudaGetDeviceProperties(properties, device); }

static __thread int current;

int cudaSetDevice(int device) {
    int count;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count)
        return INVALID_DEVICE;
    current = device;
    return SUCCESS;
}

int cudaGetDevice(int *device) {
    *device = current;
    return SUCCESS;
}

int cudaSetDeviceFlags(unsigned flags) { return SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
const char *cudaGetErrorString(int code) { return code ? "an error of the stand-in for CUDA" : "no error"; }

int cudaMalloc(void **address, size_t size) {
    *address = malloc(size);
    return SUCCESS;
}

int cudaFree(void *address) {
    free(address);
    return SUCCESS;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    memcpy(to, from, size);
    return SUCCESS;
}

int cudaMemset(void *address, int value, size_t size) {
    memset(address, value, size);
    return SUCCESS;
}

int cudaHostRegister(void *address, size_t size, unsigned flags) { return SUCCESS; }
int cudaHostUnregister(void *address) { return SUCCESS; }

struct handle {
    char bytes[64];
};

int cudaIpcGetMemHandle(struct handle *handle, void *address) { return NOT_SUPPORTED; }
int cudaIpcOpenMemHandle(void **address, struct handle handle, unsigned flags) { return NOT_SUPPORTED; }
int cudaIpcCloseMemHandle(void *address) { return NOT_SUPPORTED; }
