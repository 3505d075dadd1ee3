/* A stand-in for libze_loader.so.1: a real shared library whose devices are those of a saved sysfs tree
 * ($SAFE_GPU_FSROOT).
 *
 * As the real one does, it reads ZE_AFFINITY_MASK and ZE_FLAT_DEVICE_HIERARCHY at zeInit, and opens a render node then
 * (below the root), which stays open. Numbers are those of cards under COMPOSITE and of tiles under FLAT and COMBINED;
 * an unset hierarchy is FLAT, and an empty mask none.
 *
 * zeMemAllocDevice shows this process on the card in the tree, as a client of DRM: proc/PID/fd and fdinfo.
 * zeMemFree takes it off.
 *
 * $SAFE_GPU_FSROOT/ze_cards   a card a line, in the order of the bus ids: domain:bus:device.function tiles
 * $SAFE_GPU_FSROOT/ze_error   NAME CODE: the function NAME answers CODE (hexadecimal)
 *
 * Compile:  gcc -shared -fPIC -O1 -Wl,-soname,libze_loader.so.1 -o libze_loader.so.1 ze.c
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, MAX = 64, INVALID = 0x78000004 };

struct device {
    unsigned address[4];
};

struct pci {
    uint32_t stype;
    void *next;
    uint32_t address[4];
    int64_t speed[2];
};

static struct device shown[MAX];
static int count, ready, driver, context;

static void path_to(char *path, size_t size, const char *name)
{
    const char *root = getenv("SAFE_GPU_FSROOT");
    snprintf(path, size, "%s/%s", root ? root : "/nonexistent", name);
}

static int failing(const char *name)
{
    char path[512], wanted[64];
    unsigned code = 0, found = 0;
    path_to(path, sizeof path, "ze_error");
    FILE *file = fopen(path, "re");
    while (file && fscanf(file, "%63s %x", wanted, &code) == 2)
        if (!strcmp(wanted, name))
            found = code;
    if (file)
        fclose(file);
    return (int)found;
}

static int masked(int card, int flat, int tile, int composite)
{
    const char *mask = getenv("ZE_AFFINITY_MASK");
    if (!mask || !*mask)
        return 1;
    char *copy = strdup(mask), *rest = copy, *entry;
    int found = 0;
    while ((entry = strsep(&rest, ","))) {
        int number = atoi(entry);
        char *dot = strchr(entry, '.');
        found |= composite ? number == card && (!dot || atoi(dot + 1) == tile) : number == flat && !dot;
    }
    free(copy);
    return found;
}

int zeInit(uint32_t flags)
{
    char path[512];
    const char *hierarchy = getenv("ZE_FLAT_DEVICE_HIERARCHY");
    int composite = hierarchy && !strcmp(hierarchy, "COMPOSITE"), card = 0, flat = 0, tiles, code = failing("zeInit");
    struct device one;
    (void)flags;
    if (code || ready)
        return code;
    path_to(path, sizeof path, "dev/dri/renderD128");
    if (open(path, O_RDWR | O_CLOEXEC) < 0)
        return 0x78000001;
    path_to(path, sizeof path, "ze_cards");
    FILE *file = fopen(path, "re");
    unsigned *at = one.address;
    for (; file && fscanf(file, "%x:%x:%x.%x %d", &at[0], &at[1], &at[2], &at[3], &tiles) == 5; card++)
        for (int tile = 0, listed = 0; tile < tiles; tile++, flat++)
            if (masked(card, flat, tile, composite) && !(composite && listed++))
                shown[count++] = one;
    if (file)
        fclose(file);
    ready = 1;
    return SUCCESS;
}

int zeDriverGet(uint32_t *number, void **handles)
{
    *number = 1;
    if (handles)
        handles[0] = &driver;
    return SUCCESS;
}

int zeDeviceGet(void *of, uint32_t *number, void **handles)
{
    *number = (uint32_t)count;
    for (int i = 0; handles && i < count; i++)
        handles[i] = &shown[i];
    return of == &driver ? SUCCESS : INVALID;
}

int zeDevicePciGetPropertiesExt(struct device *device, struct pci *properties)
{
    if (properties->stype != 0x10008)
        return INVALID;
    memcpy(properties->address, device->address, sizeof device->address);
    return SUCCESS;
}

int zeContextCreate(void *of, const uint32_t *wanted, void **made)
{
    *made = &context;
    return of == &driver && *wanted == 0xd ? failing("zeContextCreate") : INVALID;
}

int zeContextDestroy(void *of)
{
    return of == &context ? SUCCESS : INVALID;
}

/* A file of this process in the tree; a place for each device. */
static void place(char *path, size_t size, const char *name, struct device *on)
{
    char below[128];
    int length = snprintf(below, sizeof below, "proc/%d%s", (int)getpid(), name);
    if (on)
        snprintf(below + length, sizeof below - length, "/%d", (int)(on - shown) + 1000);
    path_to(path, size, below);
}

int zeMemAllocDevice(void *of, const uint32_t *wanted, size_t bytes, size_t align, struct device *on, void **made)
{
    char path[512], node[512];
    int code = failing("zeMemAllocDevice");
    (void)align;
    if (code || of != &context || *wanted != 0x15)
        return code ? code : INVALID;
    *made = on;
    place(path, sizeof path, "", NULL);
    mkdir(path, 0755);
    place(path, sizeof path, "/fdinfo", NULL);
    mkdir(path, 0755);
    place(path, sizeof path, "/fdinfo", on);
    FILE *file = fopen(path, "we");
    if (!file)
        return INVALID;
    fprintf(file, "drm-driver:\txe\ndrm-client-id:\t%d\ndrm-pdev:\t%04x:%02x:%02x.%x\ndrm-resident-vram0:\t%zu KiB\n",
            (int)(on - shown), on->address[0], on->address[1], on->address[2], on->address[3], bytes >> 10);
    fclose(file);
    place(path, sizeof path, "/fd", NULL);
    mkdir(path, 0755);
    place(path, sizeof path, "/fd", on);
    path_to(node, sizeof node, "dev/dri/renderD128");
    return symlink(node, path) ? INVALID : SUCCESS;
}

int zeMemFree(void *of, void *memory)
{
    char path[512];
    place(path, sizeof path, "/fd", memory);
    unlink(path);
    return of == &context ? SUCCESS : INVALID;
}
