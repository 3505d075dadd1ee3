/* A stand-in for libamdhip64.so: a real shared library whose GPUs are those of a saved sysfs tree ($SAFE_GPU_FSROOT).
 *
 * As the real one does, it reads ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES once, at the first
 * call, and opens /dev/kfd then (below the root), which stays open. ROCR's variable holds indices and UUIDs and ends at
 * the first entry that names nothing or a GPU again. HIP's own count what ROCR has left; CUDA_VISIBLE_DEVICES is read
 * only where HIP_VISIBLE_DEVICES is unset or empty.
 *
 * hipMalloc puts this process on the GPU in the tree: sys/class/kfd/kfd/proc/PID/vram_<gpu_id>. hipFree takes it off.
 *
 * $SAFE_GPU_FSROOT/hip_gpus   a GPU a line, in the order of the nodes: gpu_id uuid bus_id (uuid: 16 hex digits)
 * $SAFE_GPU_FSROOT/hip_error  NAME CODE: the function NAME answers CODE
 * $SAFE_GPU_FSROOT/hip_integrated  gpu_id: hipDeviceAttributeIntegrated of that GPU is 1
 *
 * Compile:  gcc -shared -fPIC -O1 -pthread -Wl,-soname,libamdhip64.so -o libamdhip64.so hip.c
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101 };

#define MAX 128
#define BLOCK_BYTES (2LL << 20)

struct gpu {
    char id[32], uuid[64], bus[32];
    long long used;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct gpu all[MAX], *seen[MAX];
static int all_count, seen_count;
static __thread int current;

static void path_to(char *path, size_t size, const char *name)
{
    const char *root = getenv("SAFE_GPU_FSROOT");
    snprintf(path, size, "%s/%s", root ? root : "/nonexistent", name);
}

static int failing(const char *name)
{
    char path[512], wanted[64];
    int code = 0, found = 0;
    path_to(path, sizeof path, "hip_error");
    FILE *file = fopen(path, "re");
    while (file && fscanf(file, "%63s %d", wanted, &code) == 2)
        if (!strcmp(wanted, name))
            found = code;
    if (file)
        fclose(file);
    return found;
}

/* The entry's GPU among `count`, or -1. */
static int rocr_entry(char *entry, struct gpu **from, int count)
{
    char *end;
    int found = -1;
    while (isspace((unsigned char)*entry))
        entry++;
    for (end = entry + strlen(entry); end > entry && isspace((unsigned char)end[-1]);)
        *--end = 0;
    if (toupper((unsigned char)*entry) == 'G') {
        if (strlen(entry) < 5 || strlen(entry) > 20)
            return -1;
        for (int i = 0; i < count; i++)
            if (!strncasecmp(from[i]->uuid, entry, strlen(entry))) {
                if (found >= 0)
                    return -1;
                found = i;
            }
        return found;
    }
    long index = strtol(entry, &end, 0);
    return *end || end == entry || index < 0 || index >= count ? -1 : (int)index;
}

static int hip_entry(const char *entry, int count)
{
    char plain[32];
    int index = atoi(entry);
    snprintf(plain, sizeof plain, "%d", index);
    return index < 0 || index >= count || strcmp(plain, entry) ? -1 : index;
}

static int contains(struct gpu **list, int count, struct gpu *gpu)
{
    for (int i = 0; i < count; i++)
        if (list[i] == gpu)
            return 1;
    return 0;
}

static void look(void)
{
    char path[512];
    struct gpu *left[MAX], *from[MAX];
    int count = 0;
    path_to(path, sizeof path, "dev/kfd");
    if (open(path, O_RDWR | O_CLOEXEC) < 0)
        return;
    path_to(path, sizeof path, "hip_gpus");
    FILE *file = fopen(path, "re");
    while (file && all_count < MAX
           && fscanf(file, "%31s %63s %31s", all[all_count].id, all[all_count].uuid, all[all_count].bus) == 3)
        all_count++;
    if (file)
        fclose(file);
    for (int i = 0; i < all_count; i++)
        from[i] = &all[i];
    const char *rocr = getenv("ROCR_VISIBLE_DEVICES"), *hip = getenv("HIP_VISIBLE_DEVICES");
    if (!rocr)
        for (; count < all_count; count++)
            left[count] = from[count];
    else {
        char *copy = strdup(rocr), *rest = copy, *entry;
        while (*rocr && (entry = strsep(&rest, ","))) {
            int index = rocr_entry(entry, from, all_count);
            if (index < 0 || contains(left, count, from[index]))
                break;
            left[count++] = from[index];
        }
        free(copy);
    }
    if (!hip || !*hip)
        hip = getenv("CUDA_VISIBLE_DEVICES");
    if (!hip || !*hip) {
        memcpy(seen, left, sizeof seen);
        seen_count = count;
        return;
    }
    char *copy = strdup(hip), *rest = copy, *entry;
    while ((entry = strsep(&rest, ","))) {
        int index = hip_entry(entry, count);
        if (index < 0)
            break;
        if (!contains(seen, seen_count, left[index]))
            seen[seen_count++] = left[index];
    }
    free(copy);
}

static int start(const char *name)
{
    pthread_once(&once, look);
    return failing(name);
}

static void show(struct gpu *gpu)
{
    char place[256], path[512], fresh[600];
    snprintf(place, sizeof place, "sys/class/kfd/kfd/proc/%d", (int)getpid());
    path_to(path, sizeof path, place);
    mkdir(path, 0755);
    snprintf(place, sizeof place, "sys/class/kfd/kfd/proc/%d/vram_%s", (int)getpid(), gpu->id);
    path_to(path, sizeof path, place);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "we");
    if (!file)
        return;
    fprintf(file, "%lld\n", gpu->used);
    fclose(file);
    rename(fresh, path);
}

int hipGetDeviceCount(int *count)
{
    int code = start("hipGetDeviceCount");
    if (code)
        return code;
    *count = seen_count;
    return seen_count ? SUCCESS : NO_DEVICE;
}

int hipDeviceGetPCIBusId(char *text, int size, int device)
{
    int code = start("hipDeviceGetPCIBusId");
    if (code)
        return code;
    if (device < 0 || device >= seen_count)
        return INVALID_DEVICE;
    snprintf(text, size, "%s", seen[device]->bus);
    return SUCCESS;
}

#ifndef OLD
int hipDeviceGetUuid(char *octets, int device)
{
    int code = start("hipDeviceGetUuid");
    if (code)
        return code;
    if (device < 0 || device >= seen_count)
        return INVALID_DEVICE;
    memcpy(octets, seen[device]->uuid + 4, 16); /* without "GPU-" */
    return SUCCESS;
}
#endif

int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    char path[512], id[32] = "";
    int code = start("hipDeviceGetAttribute");
    if (code)
        return code;
    if (device < 0 || device >= seen_count)
        return INVALID_DEVICE;
    if (attribute != 16) /* hipDeviceAttributeIntegrated */
        return INVALID_VALUE;
    path_to(path, sizeof path, "hip_integrated");
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%31s", id) != 1)
        id[0] = 0;
    if (file)
        fclose(file);
    *value = !strcmp(id, seen[device]->id);
    return SUCCESS;
}

int hipGetDevice(int *device)
{
    int code = start("hipGetDevice");
    *device = current;
    return code;
}

int hipSetDevice(int device)
{
    int code = start("hipSetDevice");
    if (code)
        return code;
    if (device < 0 || device >= seen_count)
        return INVALID_DEVICE;
    current = device;
    return SUCCESS;
}

int hipMalloc(void **memory, size_t size)
{
    int code = start("hipMalloc");
    if (code)
        return code;
    if (!seen_count || !size)
        return INVALID_VALUE;
    seen[current]->used += BLOCK_BYTES;
    show(seen[current]);
    *memory = seen[current];
    return SUCCESS;
}

int hipFree(void *memory)
{
    struct gpu *gpu = memory;
    int code = start("hipFree");
    if (code)
        return code;
    gpu->used -= BLOCK_BYTES;
    show(gpu);
    return SUCCESS;
}

const char *hipGetErrorName(int code)
{
    return code == NO_DEVICE ? "hipErrorNoDevice" : code == INVALID_DEVICE ? "hipErrorInvalidDevice"
         : code == 2 ? "hipErrorOutOfMemory" : "hipErrorUnknown";
}

const char *hipGetErrorString(int code)
{
    return code == 2 ? "out of memory" : "an error";
}
