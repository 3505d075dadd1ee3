/* A stand-in for libnvidia-ml.so.1: a real shared library whose GPUs are described by text files.
 *
 * Everything is read anew at every call from the directory that $FAKE_GPU_DIR names, so that a test changes the host
 * under a running process by rewriting a file (write a new file and rename it: a call may come at any moment).
 *
 * $FAKE_GPU_DIR/gpus      one line per GPU in NVML's order, key=value separated by spaces; `#` starts a comment line:
 *     uuid=GPU-...            required
 *     name=NVIDIA_A100        underscores are shown as spaces
 *     bus=00000000:07:00.0    PCI bus id, 8-digit domain
 *     mem=BYTES               total memory;   used=BYTES   in use besides the processes below (default 0)
 *     reserved=BYTES          what the driver keeps for itself: the first version of the memory call counts it as used
 *     memory_node=N           its memory is this NUMA node of the kernel; absent: NOT_SUPPORTED
 *     util=N                  percent;        util=NA      answers NOT_SUPPORTED
 *     mode=0..3               compute mode as NVML numbers it (0 default, 2 prohibited, 3 exclusive process)
 *     display=0|1             display active
 *     persistence=0|1         persistence mode;   persistence=NA   answers NOT_SUPPORTED (also when the key is absent)
 *     mig=0|1                 MIG mode;       mig=NA       answers NOT_SUPPORTED (also when the key is absent)
 *     instances=U1,,U2        UUIDs of MIG instances by slot; an empty slot answers NOT_FOUND
 *     gi=1,,1  ci=0,,1        ids of their GPU instances and compute instances (default: slot + 1, and 0)
 *     imem=BYTES              memory of a GPU instance, which its compute instances share;   iused=BYTES  in use there
 *                             besides the processes (default 0)
 *     lost=0|1                every call about this GPU answers GPU_IS_LOST once a handle is out; =2: no handle either
 *     recovery=N              the recovery action that the driver recommends (default 0, none)
 *                             recovery=NA  it does not know that field (before R570)
 *     remap=WHAT              failed: the remapping of a row has failed; pending: one takes place at the next reset;
 *                             NA: NOT_SUPPORTED (before Ampere), as where it has MIG instances
 *     nvlink=UUID,UUID        GPUs that NVLink connects it to
 *     node_cpus=0-3,8         CPUs next to it; socket_cpus=...  those of its socket (default: as node_cpus)
 *     speed=N                 for the fake CUDA: rank in FASTEST_FIRST order, highest first
 *     FIELD_error=CODE        that question answers this NVML code; FIELD is one of handle uuid name pci memory memory_v2
 *                             util field remap mode display mig compute graphics mps imemory icompute (the last two: MIG instances)
 *                             v3 (the process lists with that suffix, though they exist)
 *
 * $FAKE_GPU_DIR/procs/UUID/PID   a process on that GPU or MIG instance; the content is its memory in bytes in decimal
 *     (empty: not available). It counts only while that process runs (a zombie does not). Suffixes, in this
 *     order, each optional:
 *         PID.static              counts always (a host pid that does not resolve in a container)
 *         .graphics  .mps         it stands in that list instead of the compute list
 *     e.g. 4711, 99999.static, 4711.graphics, 99999.static.mps. Names that do not start with a digit are ignored.
 *     A MIG parent lists the processes of its instances too, with the ids of these.
 *
 * $FAKE_GPU_DIR/options   key=value, one a line:
 *     driver_version=550.54.15
 *     init_error=CODE         nvmlInit answers this
 *     session_error=CODE      every call but nvmlInit and nvmlShutdown answers this (the driver went away)
 *     call_ms=N               every call takes N ms, and the GPUs are as they are after that
 *     hangs=NAME              a call of this function does not return as long as this line is there
 *     lag_ms=N                a process shows N ms after its file was last written
 *     hidden=1                the process lists are empty, whoever is on the GPUs; the memory in use is not
 *     log=1                   append the name of every NVML function called to $FAKE_GPU_DIR/calls
 *
 * Handles are valid in the session in which they were got: after fork() everything answers UNINITIALIZED until the
 * child calls nvmlInit, and a handle of the parent, or of a session that has ended, answers INVALID_ARGUMENT.
 *
 * Compile:  gcc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 * Variants: -DNO_V3 lacks the _v3
 *           process lists and memory_v2, -DNO_V2 lacks the _v2 ones as well, -DNO_PROCESSES lacks them all, -DNO_MPS the MPS lists,
 *           -DNO_MIG everything about MIG, -DANCIENT lacks nvmlInitWithFlags.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15
};

#define MAX_GPUS 64
#define MAX_SLOTS 8
#define LINE 4096
#define API __attribute__((visibility("default"))) int

typedef struct {
    char line[LINE];
} Gpu;

static int session_pid;   /* who called nvmlInit */
static int session_depth; /* how often */
static unsigned short session_number; /* of those of this process */

/* ---- reading the directory ---- */

static void path_to(char *out, size_t size, const char *name) {
    const char *root = getenv("FAKE_GPU_DIR");
    snprintf(out, size, "%s/%s", root ? root : "/nonexistent", name);
}

static int read_gpus(Gpu *gpus) {
    char path[LINE];
    path_to(path, sizeof path, "gpus");
    FILE *file = fopen(path, "r");
    int count = 0;
    while (file && count < MAX_GPUS && fgets(gpus[count].line, LINE, file))
        if (strstr(gpus[count].line, "uuid=") && gpus[count].line[0] != '#') count++;
    if (file) fclose(file);
    return count;
}

/* Value of ` key=` in a line, "" when absent. */
static int value_of(const char *line, const char *key, char *out, size_t size) {
    size_t length = strlen(key);
    out[0] = 0;
    for (const char *at = line; (at = strstr(at, key)); at++) {
        if ((at == line || isspace((unsigned char)at[-1])) && at[length] == '=') {
            at += length + 1;
            size_t n = strcspn(at, " \t\n");
            if (n >= size) n = size - 1;
            memcpy(out, at, n);
            out[n] = 0;
            return 1;
        }
    }
    return 0;
}

static unsigned long long number_of(const char *line, const char *key, unsigned long long otherwise) {
    char text[64];
    return value_of(line, key, text, sizeof text) && text[0] ? strtoull(text, NULL, 0) : otherwise;
}

static unsigned long long option(const char *key, unsigned long long otherwise) {
    char path[LINE], line[LINE];
    path_to(path, sizeof path, "options");
    FILE *file = fopen(path, "r");
    unsigned long long answer = otherwise;
    while (file && fgets(line, sizeof line, file)) answer = number_of(line, key, answer);
    if (file) fclose(file);
    return answer;
}

/* Whether calls of this function do not return. */
static int hangs(const char *name) {
    char path[LINE], line[LINE], found[96];
    path_to(path, sizeof path, "options");
    FILE *file = fopen(path, "r");
    int answer = 0;
    while (file && fgets(line, sizeof line, file))
        if (value_of(line, "hangs", found, sizeof found)) answer = !strcmp(found, name);
    if (file) fclose(file);
    return answer;
}

/* Each call begins with this. */
static void called(const char *name) {
    if (!name) return;
    usleep(1000 * (unsigned)option("call_ms", 0));
    if (option("log", 0)) {
        char path[LINE];
        path_to(path, sizeof path, "calls");
        FILE *file = fopen(path, "a");
        if (file) {
            fprintf(file, "%s\n", name);
            fclose(file);
        }
    }
    while (hangs(name)) usleep(5000);
}

/* ---- handles: number of the session << 48 | its pid << 16 | (slot + 1) << 8 | number + 1 ---- */

static uintptr_t of_session(void) { return (uintptr_t)session_number << 48 | (uintptr_t)session_pid << 16; }

static void *make_handle(int number, int slot) {
    return (void *)(of_session() | ((uintptr_t)(slot + 1) << 8) | (uintptr_t)(number + 1));
}

static int session_check(const char *name) {
    called(name);
    if (!session_depth || session_pid != getpid()) return UNINITIALIZED;
    return (int)option("session_error", 0);
}

/* The GPU (and MIG slot, or -1) behind a handle. */
static int resolve(const char *name, void *handle, Gpu *gpu, int *slot) {
    static __thread Gpu gpus[MAX_GPUS];
    int code = session_check(name);
    if (code) return code;
    uintptr_t value = (uintptr_t)handle;
    int number = (int)(value & 0xff) - 1;
    *slot = (int)(value >> 8 & 0xff) - 1;
    int count = read_gpus(gpus);
    if (value >> 16 != of_session() >> 16 || number < 0 || number >= count) return INVALID_ARGUMENT;
    *gpu = gpus[number];
    return number_of(gpu->line, "lost", 0) ? GPU_IS_LOST : OK;
}

#define RESOLVE(field)                                             \
    Gpu gpu;                                                       \
    int slot;                                                      \
    int code = resolve(__func__, handle, &gpu, &slot);             \
    if (!code) code = (int)number_of(gpu.line, field "_error", 0); \
    if (code) return code;                                         \
    (void)slot

static int copy_out(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

/* UUID of a MIG instance by slot; commas separate, an empty slot stays empty. */
static int instance_uuid(const char *line, int slot, char *out, size_t size) {
    char list[LINE], *rest = list, *item;
    out[0] = 0;
    if (!value_of(line, "instances", list, sizeof list)) return 0;
    for (int i = 0; (item = strsep(&rest, ",")); i++)
        if (i == slot) snprintf(out, size, "%s", item);
    return out[0] != 0;
}

/* Number at a slot of a list of ids; `otherwise` where there is none. */
static unsigned instance_id(const char *line, const char *key, int slot, unsigned otherwise) {
    char list[LINE], *rest = list, *item;
    value_of(line, key, list, sizeof list);
    for (int i = 0; (item = strsep(&rest, ",")); i++)
        if (i == slot && *item) return (unsigned)strtoul(item, NULL, 10);
    return otherwise;
}

static unsigned gpu_instance(const char *line, int slot) { return instance_id(line, "gi", slot, (unsigned)slot + 1); }
static unsigned compute_instance(const char *line, int slot) { return instance_id(line, "ci", slot, 0); }

/* ---- processes ---- */

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} Row; /* version 2 and 3 */

typedef struct {
    unsigned pid;
    unsigned long long memory;
} Row1;

static int older_than(const struct stat *info, unsigned long long lag_ms) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long long age = (now.tv_sec - info->st_mtim.tv_sec) * 1000LL + (now.tv_nsec - info->st_mtim.tv_nsec) / 1000000;
    return age >= (long long)lag_ms;
}

/* Contexts go when a process exits, not when its parent asks after it: a zombie is gone. */
static int alive(unsigned pid) {
    char text[512] = "";
    snprintf(text, sizeof text, "/proc/%u/stat", pid);
    FILE *file = fopen(text, "r");
    if (!file) return 0;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *end = strrchr(text, ')');
    return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

/* Append the processes of one UUID; `kind` is "", "graphics", "mps" or NULL for all. Returns the new count. */
static unsigned list_uuid(const char *uuid, const char *kind, unsigned gi, unsigned ci, Row *rows, unsigned count, unsigned room) {
    char path[LINE], file_path[LINE + 512];
    unsigned long long lag = option("lag_ms", 0);
    path_to(path, sizeof path, "procs/");
    strncat(path, uuid, sizeof path - strlen(path) - 1);
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        char *suffix;
        unsigned pid = (unsigned)strtoul(entry->d_name, &suffix, 10);
        int fixed = strncmp(suffix, ".static", 7) == 0;
        if (fixed) suffix += 7;
        if (kind && strcmp(*suffix ? suffix + 1 : "", kind) != 0) continue;
        if (*suffix && strcmp(suffix, ".graphics") && strcmp(suffix, ".mps")) continue; /* a file being written */
        if (!fixed && !alive(pid)) continue;
        snprintf(file_path, sizeof file_path, "%s/%s", path, entry->d_name);
        struct stat info;
        FILE *file = fopen(file_path, "r");
        if (!file) continue;
        char text[64] = "";
        int shown = fstat(fileno(file), &info) == 0 && older_than(&info, lag);
        if (shown && fgets(text, sizeof text, file) == NULL) text[0] = 0;
        fclose(file);
        if (!shown) continue;
        if (count < room) {
            memset(&rows[count], 0, sizeof rows[count]);
            rows[count].pid = pid;
            rows[count].memory = isdigit((unsigned char)text[0]) ? strtoull(text, NULL, 10) : ~0ULL;
            rows[count].gpu_instance = gi;
            rows[count].compute_instance = ci;
        }
        count++;
    }
    if (directory) closedir(directory);
    return count;
}

#define MAX_ROWS 4096

/* All processes of a device: of an instance, or of a GPU with those of its instances. */
static unsigned list_device(const char *line, int slot, const char *kind, Row *rows) {
    char uuid[96];
    unsigned count = 0;
    value_of(line, "uuid", uuid, sizeof uuid);
    if (slot < 0) count = list_uuid(uuid, kind, ~0u, ~0u, rows, count, MAX_ROWS);
    for (int i = 0; i < MAX_SLOTS; i++)
        if ((slot < 0 || i == slot) && instance_uuid(line, i, uuid, sizeof uuid))
            count = list_uuid(uuid, kind, gpu_instance(line, i), compute_instance(line, i), rows, count, MAX_ROWS);
    return count;
}

static int list_processes(const char *name, void *handle, const char *kind, unsigned *count, void *out, size_t stride) {
    static __thread Row rows[MAX_ROWS];
    Gpu gpu;
    int slot;
    int code = resolve(name, handle, &gpu, &slot);
    const char *field = slot >= 0 ? "icompute_error" : !*kind ? "compute_error" : *kind == 'g' ? "graphics_error" : "mps_error";
    if (!code) code = (int)number_of(gpu.line, field, 0);
    if (!code && strstr(name, "_v3")) code = (int)number_of(gpu.line, "v3_error", 0);
    if (code) return code;
    unsigned found = option("hidden", 0) ? 0 : list_device(gpu.line, slot, kind, rows);
    if (found > *count || (found && !out)) {
        *count = found;
        return INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < found; i++) memcpy((char *)out + i * stride, &rows[i], stride);
    *count = found;
    return OK;
}

#define LISTS(symbol, kind, stride)                                           \
    API symbol(void *handle, unsigned *count, void *rows) {                   \
        return list_processes(#symbol, handle, kind, count, rows, stride);    \
    }

#ifndef NO_PROCESSES
LISTS(nvmlDeviceGetComputeRunningProcesses, "", sizeof(Row1))
LISTS(nvmlDeviceGetGraphicsRunningProcesses, "graphics", sizeof(Row1))
#ifndef NO_MPS
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, "mps", sizeof(Row1))
#endif
#ifndef NO_V2
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, "", sizeof(Row))
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", sizeof(Row))
#ifndef NO_MPS
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", sizeof(Row))
#endif
#if !defined(NO_V3)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, "", sizeof(Row))
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", sizeof(Row))
#ifndef NO_MPS
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", sizeof(Row))
#endif
#endif
#endif
#endif

/* ---- session ---- */

static int begin(const char *name) {
    called(name);
    int code = (int)option("init_error", 0);
    if (code) return code;
    if (session_pid != getpid()) session_depth = 0;
    session_pid = getpid();
    if (!session_depth++) session_number++;
    return OK;
}

API nvmlInit_v2(void) { return begin(__func__); }
#ifndef ANCIENT
API nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return begin(__func__);
}
#else
API nvmlInit(void) { return begin(__func__); }
#endif

API nvmlShutdown(void) {
    called(__func__);
    if (!session_depth || session_pid != getpid()) return UNINITIALIZED;
    session_depth--;
    return OK;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

API nvmlSystemGetDriverVersion(char *out, unsigned size) {
    char path[LINE], line[LINE], value[80] = "550.54.15", found[80];
    int code = session_check(__func__);
    if (code) return code;
    path_to(path, sizeof path, "options");
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (value_of(line, "driver_version", found, sizeof found)) strcpy(value, found);
    if (file) fclose(file);
    return copy_out(out, size, value);
}

API nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    char path[64], name[1024] = "";
    int code = session_check(__func__);
    if (code) return code;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    size_t n = fread(name, 1, sizeof name - 1, file);
    fclose(file);
    name[n] = 0;
    return name[0] ? copy_out(out, size, name) : NOT_FOUND;
}

/* ---- devices ---- */

static int count_gpus(const char *name, unsigned *count) {
    static __thread Gpu gpus[MAX_GPUS];
    int code = session_check(name);
    if (!code) *count = (unsigned)read_gpus(gpus);
    return code;
}

static int handle_by_index(const char *name, unsigned number, void **handle) {
    static __thread Gpu gpus[MAX_GPUS];
    int code = session_check(name);
    if (code) return code;
    if ((int)number >= read_gpus(gpus)) return INVALID_ARGUMENT;
    code = (int)number_of(gpus[number].line, "handle_error", 0);
    if (code) return code;
    if (number_of(gpus[number].line, "lost", 0) == 2) return GPU_IS_LOST;
    *handle = make_handle((int)number, -1);
    return OK;
}

API nvmlDeviceGetHandleByUUID(const char *wanted, void **handle) {
    static __thread Gpu gpus[MAX_GPUS];
    int code = session_check(__func__);
    if (code) return code;
    int count = read_gpus(gpus);
    for (int number = 0; number < count; number++) {
        char uuid[96];
        value_of(gpus[number].line, "uuid", uuid, sizeof uuid);
        if (strcmp(uuid, wanted)) continue;
        code = (int)number_of(gpus[number].line, "handle_error", 0);
        if (code) return code;
        if (number_of(gpus[number].line, "lost", 0)) return GPU_IS_LOST;
        *handle = make_handle(number, -1);
        return OK;
    }
    return NOT_FOUND;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

static int pci_info(const char *name, void *handle, Pci *pci) {
    Gpu gpu;
    int slot;
    char text[64];
    int code = resolve(name, handle, &gpu, &slot);
    if (!code) code = (int)number_of(gpu.line, "pci_error", 0);
    if (code) return code;
    memset(pci, 0, sizeof *pci);
    if (!value_of(gpu.line, "bus", text, sizeof text)) strcpy(text, "00000000:00:00.0");
    sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->legacy, sizeof pci->legacy, "%.4x:%.2x:%.2x.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    snprintf(pci->id, sizeof pci->id, "%.31s", text);
    return OK;
}

API nvmlDeviceGetCount_v2(unsigned *count) { return count_gpus(__func__, count); }
API nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) { return handle_by_index(__func__, number, handle); }
API nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) { return pci_info(__func__, handle, pci); }

API nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    RESOLVE("name");
    char name[96];
    if (!value_of(gpu.line, "name", name, sizeof name)) strcpy(name, "Fake_GPU");
    for (char *at = name; *at; at++)
        if (*at == '_') *at = ' ';
    return copy_out(out, size, name);
}

API nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    RESOLVE("uuid");
    char uuid[96];
    if (slot >= 0) return instance_uuid(gpu.line, slot, uuid, sizeof uuid) ? copy_out(out, size, uuid) : NOT_FOUND;
    value_of(gpu.line, "uuid", uuid, sizeof uuid);
    return copy_out(out, size, uuid);
}

static void memory_of(const char *line, int slot, unsigned long long *total, unsigned long long *used) {
    static __thread Row rows[MAX_ROWS];
    unsigned count = list_device(line, -1, NULL, rows);
    *total = slot >= 0 ? number_of(line, "imem", 10ULL << 30) : number_of(line, "mem", 80ULL << 30);
    *used = slot >= 0 ? number_of(line, "iused", 0) : number_of(line, "used", 0);
    for (unsigned i = 0; i < count; i++)
        if (rows[i].memory != ~0ULL && (slot < 0 || rows[i].gpu_instance == gpu_instance(line, slot))) *used += rows[i].memory;
}

API nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) { /* total, free, used */
    RESOLVE("memory");
    if (slot >= 0 && (code = (int)number_of(gpu.line, "imemory_error", 0))) return code;
    memory_of(gpu.line, slot, &out[0], &out[2]);
    out[2] += number_of(gpu.line, "reserved", 0);
    out[1] = out[0] - out[2];
    return OK;
}

#if !defined(NO_V3) && !defined(NO_V2)
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;

API nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *out) {
    RESOLVE("memory");
    code = (int)number_of(gpu.line, "memory_v2_error", 0);
    if (slot >= 0 && !code) code = (int)number_of(gpu.line, "imemory_error", 0);
    if (code) return code;
    if (out->version != (sizeof *out | 2u << 24)) return 25;
    memory_of(gpu.line, slot, &out->total, &out->used);
    out->reserved = number_of(gpu.line, "reserved", 0);
    out->free = out->total - out->used - out->reserved;
    return OK;
}
#endif

API nvmlDeviceGetNumaNodeId(void *handle, unsigned *node) {
    RESOLVE("node");
    char text[16];
    if (slot >= 0 || !value_of(gpu.line, "memory_node", text, sizeof text)) return NOT_SUPPORTED;
    *node = (unsigned)atoi(text);
    return OK;
}

API nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) { /* gpu, memory */
    RESOLVE("util");
    char text[16];
    if (slot >= 0 || (value_of(gpu.line, "util", text, sizeof text) && text[0] == 'N')) return NOT_SUPPORTED;
    out[0] = (unsigned)number_of(gpu.line, "util", 0);
    out[1] = 0;
    return OK;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, code;
    union {
        unsigned number;
        unsigned long long widest;
    } value;
} Field;

API nvmlDeviceGetFieldValues(void *handle, int count, Field *fields) {
    RESOLVE("field");
    char text[16];
    int known = !(value_of(gpu.line, "recovery", text, sizeof text) && text[0] == 'N');
    for (int i = 0; i < count; i++) {
        fields[i].code = known && fields[i].field == 230 ? OK : INVALID_ARGUMENT;
        fields[i].value.number = (unsigned)number_of(gpu.line, "recovery", 0);
    }
    return OK;
}

API nvmlDeviceGetRemappedRows(void *handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    RESOLVE("remap");
    char text[16], instances[LINE];
    value_of(gpu.line, "remap", text, sizeof text);
    if (slot >= 0 || text[0] == 'N' || value_of(gpu.line, "instances", instances, sizeof instances)) return NOT_SUPPORTED;
    *correctable = *uncorrectable = 0;
    *pending = text[0] == 'p';
    *failed = text[0] == 'f';
    return OK;
}

API nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    RESOLVE("temp");
    if (slot >= 0 || sensor) return NOT_SUPPORTED;
    *out = (unsigned)number_of(gpu.line, "temp", 41);
    return OK;
}

API nvmlDeviceGetFanSpeed(void *handle, unsigned *out) {
    RESOLVE("fan");
    *out = (unsigned)number_of(gpu.line, "fan", 0);
    return slot >= 0 || *out == 0 ? NOT_SUPPORTED : OK;
}

API nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    RESOLVE("power");
    *out = (unsigned)number_of(gpu.line, "power", 62900);
    return slot >= 0 ? NOT_SUPPORTED : OK;
}

API nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) {
    RESOLVE("power_limit");
    *out = 400000;
    return slot >= 0 ? NOT_SUPPORTED : OK;
}

API nvmlDeviceGetComputeMode(void *handle, unsigned *out) {
    RESOLVE("mode");
    *out = (unsigned)number_of(gpu.line, "mode", 0);
    return OK;
}

API nvmlDeviceGetDisplayActive(void *handle, unsigned *out) {
    RESOLVE("display");
    *out = (unsigned)number_of(gpu.line, "display", 0);
    return OK;
}

API nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode) {
    RESOLVE("persistence");
    char text[16];
    if (!value_of(gpu.line, "persistence", text, sizeof text) || text[0] == 'N') return NOT_SUPPORTED;
    *mode = (unsigned)atoi(text);
    return OK;
}

API nvmlDeviceGetP2PStatus(void *handle, void *other, unsigned index, unsigned *status) {
    RESOLVE("p2p");
    Gpu peer;
    int peer_slot;
    char list[LINE], uuid[96];
    code = resolve(NULL, other, &peer, &peer_slot);
    if (code) return code;
    if (index != 2) return INVALID_ARGUMENT;
    value_of(peer.line, "uuid", uuid, sizeof uuid);
    value_of(gpu.line, "nvlink", list, sizeof list);
    *status = strstr(list, uuid) ? 0 : 5;
    return OK;
}

/* ---- CPUs ---- */

static int cpu_mask(const char *line, const char *key, unsigned words, unsigned long *mask) {
    char list[LINE];
    if (!value_of(line, key, list, sizeof list)) return 0;
    memset(mask, 0, words * sizeof *mask);
    for (char *at = list; *at;) {
        unsigned long low = strtoul(at, &at, 10), high = low;
        if (*at == '-') high = strtoul(at + 1, &at, 10);
        for (; low <= high && low / 64 < words; low++) mask[low / 64] |= 1ul << low % 64;
        if (*at != ',') break;
        at++;
    }
    return 1;
}

API nvmlDeviceGetCpuAffinityWithinScope(void *handle, unsigned words, unsigned long *mask, unsigned scope) {
    RESOLVE("affinity");
    if (scope == 1 && cpu_mask(gpu.line, "socket_cpus", words, mask)) return OK;
    return cpu_mask(gpu.line, "node_cpus", words, mask) ? OK : NOT_SUPPORTED;
}

/* ---- MIG ---- */

#ifndef NO_MIG
API nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    RESOLVE("mig");
    char text[16];
    if (!value_of(gpu.line, "mig", text, sizeof text) || text[0] == 'N') return NOT_SUPPORTED;
    *current = *pending = (unsigned)atoi(text);
    return OK;
}

API nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    RESOLVE("mig");
    *count = MAX_SLOTS - 1;
    return OK;
}

API nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    RESOLVE("mig");
    char uuid[96];
    if (!instance_uuid(gpu.line, (int)index, uuid, sizeof uuid)) return NOT_FOUND;
    *instance = make_handle((int)((uintptr_t)handle & 0xff) - 1, (int)index);
    return OK;
}

API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **parent) {
    RESOLVE("mig");
    *parent = make_handle((int)((uintptr_t)handle & 0xff) - 1, -1);
    return OK;
}

API nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
    RESOLVE("mig");
    if (slot < 0) return INVALID_ARGUMENT;
    *id = gpu_instance(gpu.line, slot);
    return OK;
}

API nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) {
    RESOLVE("mig");
    if (slot < 0) return INVALID_ARGUMENT;
    *id = compute_instance(gpu.line, slot);
    return OK;
}
#endif
