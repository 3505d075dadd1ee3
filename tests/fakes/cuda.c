/* A stand-in for libcuda.so.1: a real shared library whose GPUs are those of the fake NVML beside it (nvml.c).
 *
 * $FAKE_GPU_DIR/gpus      as nvml.c describes it; read here: uuid name bus mem mode mig instances imem lost speed, and
 *     bad=CODE                cuDevicePrimaryCtxRetain answers this for that GPU
 *     bad_init=CODE           cuInit answers this where that GPU is visible
 * $FAKE_GPU_DIR/procs/UUID/PID   made by the first retain of a primary context on that GPU or MIG instance, with the
 *                         bytes that it uses; removed by the last release. This is what the fake NVML shows.
 * $FAKE_GPU_DIR/options   key=value, one a line:
 *     cuda_init_error=CODE    cuInit answers this
 *     cuda_init_ms=N          cuInit takes N ms
 *     ctx_error=CODE          cuDevicePrimaryCtxRetain answers this
 *     alloc_error=CODE        cuMemAlloc answers this
 *     ctx_ms=N                creating a context takes N ms
 *     thread_ids=1            PID above is the id of the thread that made the context, as with drivers 535 to 570.144
 *     listed_as=N             PID above is N: the process's number in another PID namespace
 *     log=1                   append "PID NAME" of every function called to $FAKE_GPU_DIR/cuda_calls
 *
 * As the real driver does, it reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, at the first cuInit, and answers
 * NOT_INITIALIZED to everything before that, after a cuInit that found no GPU, and in a forked child of a process that
 * called cuInit. CUDA_VISIBLE_DEVICES: indices in CUDA's order, unique prefixes of UUIDs, MIG UUIDs; the list ends at
 * the first entry that names nothing, a duplicate leaves none, an empty value too. A MIG instance is seen alone. Lost
 * GPUs and GPUs with MIG on are not seen, but the first instance of the latter is where nothing else is.
 * Compute modes 3 (exclusive process: another live process is on the GPU) and 2 (prohibited) refuse contexts.
 *
 * Compile:  gcc -shared -fPIC -O1 -pthread -Wl,-soname,libcuda.so.1 -o libcuda.so.1 cuda.c
 * Variant:  -DOLD lacks cuDeviceGetUuid_v2 and cuDevicePrimaryCtxRelease_v2.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, UNKNOWN = 999
};

#define MAX 128
#define CONTEXT_BYTES (300LL << 20)
#define BLOCK_BYTES (2LL << 20) /* what the driver takes from the card at a time */

struct gpu {
    char uuid[96], parent[96], name[96], bus[32];
    long long mem, speed;
    int mode, mig, lost, bad, bad_init;
};

struct context { /* the primary context of a visible device */
    int references, allocations;
    long long used;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct gpu seen[MAX];
static struct context contexts[MAX];
static int seen_count, init_result;
static pid_t init_pid; /* where cuInit was called first; 0: nowhere */

static __thread struct context *stack[64];
static __thread int depth;

/* --- the described host ------------------------------------------------------------------------------------------ */

static FILE *open_in_dir(const char *name, const char *mode)
{
    const char *directory = getenv("FAKE_GPU_DIR");
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory ? directory : "/nonexistent", name);
    return fopen(path, mode);
}

static long long option(const char *key, long long otherwise)
{
    FILE *file = open_in_dir("options", "re");
    char line[256];
    size_t length = strlen(key);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == '=')
            otherwise = atoll(line + length + 1);
    if (file)
        fclose(file);
    return otherwise;
}

static void record(const char *name)
{
    FILE *file = option("log", 0) ? open_in_dir("cuda_calls", "ae") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", (int)getpid(), name);
        fclose(file);
    }
}

/* GPUs by PCI bus id, each MIG GPU followed by its instances. */
static int by_bus(const void *a, const void *b)
{
    return strcasecmp(((const struct gpu *)a)->bus, ((const struct gpu *)b)->bus);
}

static int by_speed(const void *a, const void *b)
{
    const struct gpu *x = a, *y = b;
    return x->speed != y->speed ? (x->speed < y->speed ? 1 : -1) : by_bus(a, b);
}

static int read_gpus(struct gpu *gpus, char instances[][1024], long long *instance_mem)
{
    FILE *file = open_in_dir("gpus", "re");
    char line[8192];
    int count = 0;
    while (file && count < MAX && fgets(line, sizeof line, file)) {
        struct gpu gpu = {.mem = 1LL << 30};
        char slots[1024] = "", *rest = line, *word;
        long long imem = 0;
        if (*line == '#')
            continue;
        while ((word = strtok_r(rest, " \t\n", &rest))) {
            char *value = strchr(word, '=');
            if (!value)
                continue;
            *value++ = 0;
            if (!strcmp(word, "uuid")) snprintf(gpu.uuid, sizeof gpu.uuid, "%s", value);
            if (!strcmp(word, "name")) snprintf(gpu.name, sizeof gpu.name, "%s", value);
            if (!strcmp(word, "bus")) snprintf(gpu.bus, sizeof gpu.bus, "%s", value);
            if (!strcmp(word, "instances")) snprintf(slots, sizeof slots, "%s", value);
            if (!strcmp(word, "mem")) gpu.mem = atoll(value);
            if (!strcmp(word, "imem")) imem = atoll(value);
            if (!strcmp(word, "speed")) gpu.speed = atoll(value);
            if (!strcmp(word, "mode")) gpu.mode = atoi(value);
            if (!strcmp(word, "mig")) gpu.mig = atoi(value);
            if (!strcmp(word, "lost")) gpu.lost = atoi(value);
            if (!strcmp(word, "bad")) gpu.bad = atoi(value);
            if (!strcmp(word, "bad_init")) gpu.bad_init = atoi(value);
        }
        if (!*gpu.uuid)
            continue;
        for (char *c = gpu.name; *c; c++)
            if (*c == '_')
                *c = ' ';
        strcpy(instances[count], slots);
        instance_mem[count] = imem;
        gpus[count++] = gpu;
    }
    if (file)
        fclose(file);
    return count;
}

/* Whole GPUs in CUDA's order into `whole`, MIG instances into `slices`. */
static void read_host(struct gpu *whole, int *whole_count, struct gpu *slices, int *slice_count)
{
    static struct gpu gpus[MAX];
    static char instances[MAX][1024];
    static long long instance_mem[MAX];
    const char *order = getenv("CUDA_DEVICE_ORDER");
    int count = read_gpus(gpus, instances, instance_mem);
    *whole_count = *slice_count = 0;
    for (int i = 0; i < count; i++) {
        char *rest = instances[i], *uuid;
        if (gpus[i].lost)
            continue;
        if (!gpus[i].mig)
            whole[(*whole_count)++] = gpus[i];
        while (gpus[i].mig && (uuid = strsep(&rest, ",")) && *slice_count < MAX) {
            struct gpu *slice = &slices[*slice_count];
            if (!*uuid)
                continue;
            *slice = gpus[i];
            snprintf(slice->uuid, sizeof slice->uuid, "%s", uuid);
            memcpy(slice->parent, gpus[i].uuid, sizeof slice->parent);
            strncat(slice->name, " MIG 1g.10gb", sizeof slice->name - strlen(slice->name) - 1);
            slice->mem = instance_mem[i] ? instance_mem[i] : gpus[i].mem;
            ++*slice_count;
        }
    }
    qsort(whole, *whole_count, sizeof *whole, order && !strcmp(order, "PCI_BUS_ID") ? by_bus : by_speed);
}

/* The device that one entry of CUDA_VISIBLE_DEVICES names, or NULL. */
static struct gpu *lookup(char *entry, struct gpu *whole, int whole_count, struct gpu *slices, int slice_count)
{
    struct gpu *found = NULL, *pool = whole;
    int count = whole_count;
    char *end;
    while (isspace((unsigned char)*entry))
        entry++;
    for (end = entry + strlen(entry); end > entry && isspace((unsigned char)end[-1]);)
        *--end = 0;
    if (isdigit((unsigned char)*entry)) {
        long index = strtol(entry, &end, 10);
        return *end || index >= whole_count ? NULL : &whole[index];
    }
    if (!strncmp(entry, "MIG-", 4)) {
        pool = slices;
        count = slice_count;
    } else if (strncmp(entry, "GPU-", 4))
        return NULL;
    for (int i = 0; i < count; i++)
        if (!strncasecmp(pool[i].uuid, entry, strlen(entry))) {
            if (found)
                return NULL;
            found = &pool[i];
        }
    return found;
}

static void look(void)
{
    static struct gpu whole[MAX], slices[MAX];
    int whole_count, slice_count;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    read_host(whole, &whole_count, slices, &slice_count);
    seen_count = 0;
    if (!visible) {
        for (int i = 0; i < whole_count; i++)
            seen[seen_count++] = whole[i];
        if (!seen_count && slice_count)
            seen[seen_count++] = slices[0];
        return;
    }
    char *copy = strdup(visible), *rest = copy, *entry;
    while ((entry = strsep(&rest, ",")) && seen_count < MAX) {
        struct gpu *gpu = lookup(entry, whole, whole_count, slices, slice_count);
        if (!gpu)
            break;
        for (int i = 0; i < seen_count; i++)
            if (!strcmp(seen[i].uuid, gpu->uuid)) {
                seen_count = 0;
                free(copy);
                return;
            }
        seen[seen_count++] = *gpu;
    }
    free(copy);
    for (int i = 0; i < seen_count; i++)
        if (*seen[i].parent) {
            seen[0] = seen[i];
            seen_count = 1;
        }
}

/* --- processes on GPUs ------------------------------------------------------------------------------------------- */

static void process_dir(const struct gpu *gpu, char *path, size_t size)
{
    const char *directory = getenv("FAKE_GPU_DIR");
    snprintf(path, size, "%s/procs", directory ? directory : "/nonexistent");
    if (!mkdir(path, 01777))
        chmod(path, 01777); /* whatever the umask says */
    snprintf(path, size, "%s/procs/%s", directory ? directory : "/nonexistent", gpu->uuid);
    if (!mkdir(path, 01777))
        chmod(path, 01777);
}

/* The number under which the driver lists this process on a visible device. */
static int number_on(const struct gpu *gpu)
{
    static int numbers[MAX];
    int *number = &numbers[gpu - seen];
    if (!*number)
        *number = (int)option("listed_as", option("thread_ids", 0) ? (long long)syscall(SYS_gettid) : getpid());
    return *number;
}

static void write_process(const struct gpu *gpu, long long bytes)
{
    char directory[600], path[700], fresh[700];
    process_dir(gpu, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/%d", directory, number_on(gpu));
    snprintf(fresh, sizeof fresh, "%s/.%d", directory, (int)getpid());
    FILE *file = fopen(fresh, "we");
    if (!file)
        return;
    fchmod(fileno(file), 0666);
    fprintf(file, "%lld\n", bytes);
    fclose(file);
    rename(fresh, path);
}

static void remove_process(const struct gpu *gpu)
{
    char directory[600], path[700];
    process_dir(gpu, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/%d", directory, number_on(gpu));
    unlink(path);
}

static int others_on(const struct gpu *gpu)
{
    char directory[600], proc[64];
    struct dirent *entry;
    int others = 0;
    process_dir(gpu, directory, sizeof directory);
    DIR *stream = opendir(directory);
    while (stream && (entry = readdir(stream))) {
        int pid = atoi(entry->d_name);
        snprintf(proc, sizeof proc, "/proc/%d", pid);
        if (isdigit((unsigned char)*entry->d_name) && pid != getpid()
            && (strstr(entry->d_name, ".static") || !access(proc, F_OK)))
            others++;
    }
    if (stream)
        closedir(stream);
    return others;
}

static int current_mode(const struct gpu *gpu)
{
    static struct gpu gpus[MAX];
    static char instances[MAX][1024];
    static long long instance_mem[MAX];
    const char *uuid = *gpu->parent ? gpu->parent : gpu->uuid;
    int count = read_gpus(gpus, instances, instance_mem);
    for (int i = 0; i < count; i++)
        if (!strcmp(gpus[i].uuid, uuid))
            return gpus[i].mode;
    return gpu->mode;
}

/* Come onto the GPU, if its compute mode lets us; two processes at once are told apart by a lock. */
static int enter(const struct gpu *gpu)
{
    char directory[600], path[700];
    int mode = current_mode(gpu), result = SUCCESS;
    process_dir(gpu, directory, sizeof directory);
    snprintf(path, sizeof path, "%s/.lock", directory);
    int lock = open(path, O_RDWR | O_CLOEXEC);
    if (lock < 0) { /* never O_CREAT on another user's file: fs.protected_regular forbids it in a sticky directory */
        lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        fchmod(lock, 0666);
    }
    flock(lock, LOCK_EX);
    if (mode == 2 || (mode == 3 && others_on(gpu)))
        result = DEVICE_UNAVAILABLE;
    else
        write_process(gpu, CONTEXT_BYTES);
    close(lock);
    return result;
}

static void sleep_for(const char *key)
{
    long long pause = option(key, 0);
    struct timespec span = {pause / 1000, pause % 1000 * 1000000};
    nanosleep(&span, NULL);
}

/* --- the driver API ---------------------------------------------------------------------------------------------- */

#define API __attribute__((visibility("default"))) int

static int ready(void)
{
    return init_pid == getpid() ? init_result : NOT_INITIALIZED;
}

#define ENTER                                                                                                         \
    record(__func__);                                                                                                 \
    if (ready() != SUCCESS)                                                                                           \
        return NOT_INITIALIZED;

#define DEVICE(device)                                                                                                \
    ENTER if ((device) < 0 || (device) >= seen_count) return INVALID_DEVICE;

API cuInit(unsigned flags)
{
    record(__func__);
    if (flags)
        return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    if (!init_pid) {
        init_pid = getpid();
        look();
        sleep_for("cuda_init_ms");
        init_result = option("cuda_init_error", seen_count ? SUCCESS : NO_DEVICE);
        for (int i = 0; i < seen_count; i++)
            if (seen[i].bad_init)
                init_result = seen[i].bad_init;
    }
    int result = init_pid == getpid() ? init_result : NOT_INITIALIZED;
    pthread_mutex_unlock(&mutex);
    return result;
}

API cuDriverGetVersion(int *version)
{
    record(__func__);
    *version = 12040;
    return SUCCESS;
}

API cuDeviceGetCount(int *count)
{
    ENTER
    *count = seen_count;
    return SUCCESS;
}

API cuDeviceGet(int *device, int ordinal)
{
    DEVICE(ordinal)
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char *name, int size, int device)
{
    DEVICE(device)
    snprintf(name, size, "%s", seen[device].name);
    return SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    DEVICE(device)
    *bytes = seen[device].mem;
    return SUCCESS;
}

API cuDeviceGetPCIBusId(char *bus, int size, int device)
{
    DEVICE(device)
    snprintf(bus, size, "%s", seen[device].bus);
    return SUCCESS;
}

static int octets(unsigned char *out, const char *uuid)
{
    int nibbles = 0;
    memset(out, 0, 16);
    for (const char *c = uuid + 4; *c && nibbles < 32; c++)
        if (isxdigit((unsigned char)*c)) {
            int value = isdigit((unsigned char)*c) ? *c - '0' : tolower((unsigned char)*c) - 'a' + 10;
            out[nibbles / 2] |= value << (nibbles % 2 ? 0 : 4);
            nibbles++;
        }
    return SUCCESS;
}

API cuDeviceGetUuid(unsigned char *uuid, int device) /* of the GPU, also for an instance of it */
{
    DEVICE(device)
    return octets(uuid, *seen[device].parent ? seen[device].parent : seen[device].uuid);
}

API cuDevicePrimaryCtxRetain(struct context **context, int device)
{
    DEVICE(device)
    int result = option("ctx_error", seen[device].bad);
    pthread_mutex_lock(&mutex);
    if (result == SUCCESS && !contexts[device].references) {
        sleep_for("ctx_ms");
        result = enter(&seen[device]);
        contexts[device].used = CONTEXT_BYTES;
        contexts[device].allocations = 0;
    }
    if (result == SUCCESS) {
        contexts[device].references++;
        *context = &contexts[device];
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    DEVICE(device)
    *flags = 0;
    *active = contexts[device].references > 0;
    return SUCCESS;
}

static int release(int device)
{
    int result = SUCCESS;
    pthread_mutex_lock(&mutex);
    if (!contexts[device].references)
        result = INVALID_CONTEXT;
    else if (!--contexts[device].references)
        remove_process(&seen[device]);
    pthread_mutex_unlock(&mutex);
    return result;
}

#ifdef OLD
API cuDevicePrimaryCtxRelease(int device)
{
    DEVICE(device)
    return release(device);
}
#else
API cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    DEVICE(device)
    return octets(uuid, seen[device].uuid);
}

API cuDevicePrimaryCtxRelease_v2(int device)
{
    DEVICE(device)
    return release(device);
}
#endif

API cuGetErrorName(int code, const char **text)
{
    static const struct { int code; const char *name; } names[] = {
        {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
        {214, "CUDA_ERROR_ECC_UNCORRECTABLE"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
        {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *text = names[i].name;
            return SUCCESS;
        }
    *text = NULL;
    return INVALID_VALUE;
}

API cuGetErrorString(int code, const char **text)
{
    *text = code == DEVICE_UNAVAILABLE ? "CUDA-capable device(s) is/are busy or unavailable" : NULL;
    return *text ? SUCCESS : INVALID_VALUE;
}

API cuCtxPushCurrent_v2(struct context *context)
{
    ENTER
    if (!context || !context->references || depth == 64)
        return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

API cuCtxPopCurrent_v2(struct context **context)
{
    ENTER
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return SUCCESS;
}

API cuCtxGetCurrent(struct context **context)
{
    ENTER
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

API cuCtxSetCurrent(struct context *context)
{
    ENTER
    if (context && !context->references)
        return INVALID_CONTEXT;
    if (depth)
        depth--;
    if (context)
        stack[depth++] = context;
    return SUCCESS;
}

API cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
    ENTER
    struct context *context = depth ? stack[depth - 1] : NULL;
    int result = option("alloc_error", SUCCESS);
    if (result != SUCCESS)
        return result;
    if (!context || !context->references)
        return INVALID_CONTEXT;
    if (!bytes)
        return INVALID_VALUE;
    long long blocks = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
    const struct gpu *gpu = &seen[context - contexts];
    pthread_mutex_lock(&mutex);
    if (context->used + blocks > gpu->mem)
        result = OUT_OF_MEMORY;
    else {
        size_t *memory = malloc(sizeof *memory);
        *memory = blocks;
        *pointer = (unsigned long long)memory;
        context->used += blocks;
        context->allocations++;
        write_process(gpu, context->used);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

API cuMemFree_v2(unsigned long long pointer)
{
    ENTER
    struct context *context = depth ? stack[depth - 1] : NULL;
    if (!context || !context->references)
        return INVALID_CONTEXT;
    if (!pointer || !context->allocations)
        return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    size_t *memory = (size_t *)pointer;
    context->used -= *memory;
    context->allocations--;
    free(memory);
    write_process(&seen[context - contexts], context->used);
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}
