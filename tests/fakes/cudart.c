/* Stands in for libcudart.so where Dragon 0.15 counts GPUs: as many as FAKE_CUDA_DEVICES says (8), within
 * CUDA_VISIBLE_DEVICES as CUDA would. */
#include <stdlib.h>
#include <string.h>

int cudaGetDeviceCount(int *count) {
    const char *all = getenv("FAKE_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = all ? atoi(all) : 8;
    if (visible) {
        *count = *visible != 0;
        while ((visible = strchr(visible, ',')))
            visible++, ++*count;
    }
    return 0;
}

int cudaGetDeviceProperties(void *properties, int device) {
    memset(properties, 0, 256);
    strcpy(properties, "NVIDIA H100");
    memset((char *)properties + 256, device + 1, 16); /* the UUID follows the name */
    return 0;
}

int cudaGetDeviceProperties_v2(void *properties, int device) { return cudaGetDeviceProperties(properties, device); }
