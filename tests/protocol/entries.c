/* A claimer of safe_gpu/coordination/PROTOCOL-ENTRIES.md, written from that page alone.
 *
 *   entries STATE NUMBER SHARE CAPACITY PATIENCE UUID...
 *
 * It claims NUMBER of the GPUs, a share of SHARE bytes of each, or all of them where SHARE is 0, and tries for PATIENCE
 * seconds. It prints the UUIDs, holds them until a line comes on its standard input, and gives them back. Exit: 75 no
 * GPUs, 70 anything else that failed. It makes no token, joins no queue and asks no driver.
 *
 * cc -std=c11 -Wall -Wextra -Werror -o entries entries.c
 * Builds that must be caught: -DONE_LISTING does not list again after its entry has its name. -DNO_DOORS takes none. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 64, ENTRIES = 4096, TEXT = 64 * 1024, PARTS = 32, UUID_SIZE = 100 };

struct gpu {
  char uuid[UUID_SIZE + 1];
  int door, part, part_door; /* -1: not held */
  bool chosen, elsewhere;
};

struct entry { /* of a living claim */
  dev_t dev;
  ino_t ino;
  uid_t uid;
  char token[65], inside[65];
  long long bytes[GPUS]; /* of each of our GPUs; 0: none, -1: all of it */
  int part[GPUS];        /* -1: none */
};

static struct gpu gpus[GPUS];
static int gpu_count, wanted, state_fd, claims_fd, mine = -1;
static long long share, capacity;
static char mine_name[64];
static struct entry living[ENTRIES];
static int living_count;
static long long highest;

static _Noreturn void die(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  fputs("entries: ", stderr);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, ": %s\n", strerror(errno));
  exit(70);
}

static double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void nap(double least, double most)
{
  unsigned short r;
  if (getrandom(&r, sizeof r, 0) != sizeof r)
    r = 0;
  double s = least + (most - least) * r / 65535;
  struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
  nanosleep(&t, NULL);
}

static void hexadecimal(char out[17])
{
  unsigned char r[8];
  if (getrandom(r, sizeof r, 0) != sizeof r)
    die("getrandom");
  for (int i = 0; i < 8; i++)
    sprintf(out + 2 * i, "%02x", r[i]);
}

/* ---- JSON: a reader that calls back with the keys of the first two levels ---- */

static const char *at;
static bool bad;

static void blanks(void) { while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r') at++; }

static void text(char *out, size_t size) /* escapes are kept as they are: no UUID and no hash has one */
{
  size_t n = 0;
  if (*at++ != '"')
    bad = true;
  while (!bad && *at && *at != '"') {
    if (*at == '\\' && at[1])
      at++;
    if (n + 1 < size)
      out[n++] = *at;
    at++;
  }
  out[n] = 0;
  if (*at)
    at++;
  else
    bad = true;
}

static void value(struct entry *e, const char *above, const char *key, int depth);

static void members(struct entry *e, const char *above, int depth, char close)
{
  at++;
  blanks();
  while (!bad && *at && *at != close) {
    char key[256] = "";
    if (close == '}') {
      text(key, sizeof key);
      blanks();
      if (*at++ != ':')
        bad = true;
      blanks();
    }
    if (!bad)
      value(e, above, key, depth);
    blanks();
    if (*at == ',')
      at++;
    blanks();
  }
  if (*at)
    at++;
  else
    bad = true;
}

static void value(struct entry *e, const char *above, const char *key, int depth)
{
  char word[256] = "";
  if (depth > 20) {
    bad = true;
  } else if (*at == '{' || *at == '[') {
    members(e, depth == 1 ? key : "", depth + 1, *at == '{' ? '}' : ']');
  } else if (*at == '"') {
    text(word, sizeof word);
    if (depth == 1 && !strcmp(key, "token"))
      snprintf(e->token, sizeof e->token, "%.64s", word);
    if (depth == 1 && !strcmp(key, "inside"))
      snprintf(e->inside, sizeof e->inside, "%.64s", word);
  } else {
    size_t n = strspn(at, "-+.0123456789eEaflnrstuINy");
    bad = bad || !n || n >= sizeof word;
    if (!bad)
      memcpy(word, at, n);
    at += n;
    for (int i = 0; depth == 2 && i < gpu_count; i++)
      if (!strcmp(gpus[i].uuid, key)) {
        if (!strcmp(above, "gpus"))
          e->bytes[i] = strcmp(word, "null") ? atoll(word) : -1;
        else if (!strcmp(above, "parts"))
          e->part[i] = atoi(word);
      }
  }
}

/* ---- entries ---- */

static bool is_locked(int fd)
{
  struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
  if (fcntl(fd, F_OFD_GETLK, &lock))
    die("F_OFD_GETLK");
  return lock.l_type == F_WRLCK;
}

static bool is_name(const char *name, long long *number)
{
  size_t digits = strspn(name, "0123456789");
  if (!digits || digits > 18 || (*name == '0' && digits > 1) || name[digits] != '.')
    return false;
  if (strspn(name + digits + 1, "0123456789abcdef") != 16 || name[digits + 17])
    return false;
  *number = atoll(name);
  return true;
}

static void read_entry(const char *name)
{
  static char data[TEXT + 1];
  int fd = openat(claims_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT || errno == ELOOP || errno == EACCES || errno == EPERM || errno == ENXIO || errno == EWOULDBLOCK)
      return;
    die("%s", name);
  }
  struct stat s;
  struct entry e = {0};
  if (fstat(fd, &s))
    die("fstat");
  if (S_ISREG(s.st_mode) && !(s.st_mode & 022) && s.st_size <= TEXT && is_locked(fd)) {
    ssize_t n = pread(fd, data, TEXT, 0);
    data[n < 0 ? 0 : n] = 0;
    for (int i = 0; i < GPUS; i++)
      e.part[i] = -1;
    e.dev = s.st_dev, e.ino = s.st_ino, e.uid = s.st_uid;
    at = data, bad = *data != '{';
    if (!bad)
      members(&e, "", 1, '}');
    bool known = bad;
    for (int i = 0; i < living_count; i++)
      known = known || (living[i].dev == e.dev && living[i].ino == e.ino);
    if (!known && living_count < ENTRIES)
      living[living_count++] = e;
  }
  close(fd);
}

static int by_number(const void *a, const void *b)
{
  long long x = *(const long long *)a, y = *(const long long *)b;
  return (x > y) - (x < y);
}

static void list(void) /* fills living and highest */
{
  static long long numbers[65536];
  int count = 0, fd = openat(claims_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *directory = fd < 0 ? NULL : fdopendir(fd);
  if (!directory)
    die("claims");
  living_count = 0;
  for (struct dirent *d; (d = readdir(directory)) && count < 65536;)
    if (is_name(d->d_name, &numbers[count])) {
      count++;
      read_entry(d->d_name);
    }
  closedir(directory);
  qsort(numbers, (size_t)count, sizeof *numbers, by_number);
  highest = 0;
  for (int i = 0; i < count && numbers[i] <= highest + 1000000000000; i++)
    highest = numbers[i];
}

static bool is_mine(const struct entry *e)
{
  struct stat s;
  return mine >= 0 && !fstat(mine, &s) && s.st_dev == e->dev && s.st_ino == e->ino;
}

static long long room(int gpu) /* for a claim that is inside none */
{
  long long left = capacity;
  for (int i = 0; i < living_count; i++) {
    const struct entry *e = &living[i];
    bool beneath = false;
    for (int k = 0; *e->inside && k < living_count; k++)
      beneath = beneath || (living[k].uid == e->uid && !strcmp(living[k].token, e->inside));
    if (!is_mine(e) && !beneath)
      left -= e->bytes[gpu] < 0 ? capacity : e->bytes[gpu];
  }
  return left;
}

static bool make_entry(void)
{
  char temporary[32] = ".", body[GPUS * (UUID_SIZE + 40) * 2 + 256], *end = body;
  hexadecimal(temporary + 1);
  end += sprintf(end, "{\"v\":1,\"pid\":%d,\"token\":\"\",\"inside\":\"\",\"gpus\":{", (int)getpid());
  for (int i = 0, n = 0; i < gpu_count; i++)
    if (gpus[i].chosen) {
      end += sprintf(end, "%s\"%s\":", n++ ? "," : "", gpus[i].uuid);
      end += share ? sprintf(end, "%lld", share) : sprintf(end, "null");
    }
  end += sprintf(end, "},\"parts\":{");
  for (int i = 0, n = 0; i < gpu_count; i++)
    if (gpus[i].chosen && gpus[i].part >= 0)
      end += sprintf(end, "%s\"%s\":%d", n++ ? "," : "", gpus[i].uuid, gpus[i].part);
  end += sprintf(end, "}}\n");
  mine = openat(claims_fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (mine < 0)
    die("%s", temporary);
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  if (write(mine, body, (size_t)(end - body)) != end - body || fcntl(mine, F_OFD_SETLK, &lock) || fchmod(mine, 0644))
    die("write");
  int n = sprintf(mine_name, "%lld.", highest + 1);
  hexadecimal(mine_name + n);
  struct stat by_name, by_fd;
  return !renameat2(claims_fd, temporary, claims_fd, mine_name, RENAME_NOREPLACE) && !fstat(mine, &by_fd) &&
         !fstatat(claims_fd, mine_name, &by_name, AT_SYMLINK_NOFOLLOW) && by_name.st_ino == by_fd.st_ino &&
         by_name.st_dev == by_fd.st_dev;
}

/* ---- doors ---- */

static socklen_t address(struct sockaddr_un *a, const char *uuid, int part)
{
  char name[sizeof a->sun_path];
  int n = part < 0 ? snprintf(name, sizeof name, "safe-gpu/1/%s", uuid)
                   : snprintf(name, sizeof name, "safe-gpu/1/%s.%d", uuid, part);
  for (int i = 0; i < n; i++)
    if (i > 10 && name[i] == '/')
      name[i] = '_';
  while (n < 48)
    name[n++] = '.';
  memset(a, 0, sizeof *a);
  a->sun_family = AF_UNIX;
  memcpy(a->sun_path + 1, name, (size_t)n);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int take_door(const char *uuid, int part) /* a descriptor, -1: another process has it */
{
  struct sockaddr_un a;
  socklen_t size = address(&a, uuid, part);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0)
    die("socket");
  if (!bind(fd, (struct sockaddr *)&a, size) && !shutdown(fd, SHUT_RDWR))
    return fd;
  if (errno != EADDRINUSE)
    die("bind");
  close(fd);
  return -1;
}

static bool is_held(const char *uuid, int part)
{
  struct sockaddr_un a;
  socklen_t size = address(&a, uuid, part);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0)
    die("socket");
  bool held = !connect(fd, (struct sockaddr *)&a, size) || errno != ECONNREFUSED;
  close(fd);
  return held;
}

static bool is_part(int gpu, int part)
{
  for (int i = 0; i < living_count; i++)
    if (!is_mine(&living[i]) && living[i].part[gpu] == part)
      return true;
  return false;
}

static bool take_doors(int i)
{
  struct gpu *gpu = &gpus[i];
#ifdef NO_DOORS
  return true;
#endif
  if ((gpu->door = take_door(gpu->uuid, -1)) < 0)
    return false;
  for (int part = 0; part < PARTS; part++)
    if (is_held(gpu->uuid, part) && !is_part(i, part))
      return false;
  if (!share)
    return true;
  for (int part = 0; part < PARTS && gpu->part_door < 0; part++)
    if (!is_part(i, part) && (gpu->part_door = take_door(gpu->uuid, part)) >= 0)
      gpu->part = part;
  close(gpu->door);
  gpu->door = -1;
  return gpu->part_door >= 0;
}

static void let_go(struct gpu *gpu)
{
  if (gpu->door >= 0)
    close(gpu->door);
  if (gpu->part_door >= 0)
    close(gpu->part_door);
  gpu->door = gpu->part_door = gpu->part = -1;
  gpu->chosen = false;
}

static void release(void)
{
  for (int i = 0; i < gpu_count; i++)
    let_go(&gpus[i]);
  if (mine >= 0) {
    unlinkat(claims_fd, mine_name, 0);
    close(mine); /* no child has a copy */
    mine = -1;
  }
}

/* ---- a claim ---- */

static int lock_host(void)
{
  for (;;) {
    int fd = openat(state_fd, "host.lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
      fd = openat(state_fd, "host.lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0)
      die("host.lock");
    while (flock(fd, LOCK_EX | LOCK_NB))
      nap(0.001, 0.005);
    struct stat by_fd, by_name;
    if (!fstat(fd, &by_fd) && !fstatat(state_fd, "host.lock", &by_name, AT_SYMLINK_NOFOLLOW) &&
        by_fd.st_ino == by_name.st_ino)
      return fd;
    close(fd);
  }
}

static bool claim(void)
{
  list();
  int host = lock_host(), taken = 0;
  list();
  for (int i = 0; i < gpu_count && taken < wanted; i++)
    if (room(i) >= (share ? share : capacity)) {
      if (take_doors(i)) {
        gpus[i].chosen = true;
        taken++;
      } else {
        let_go(&gpus[i]);
      }
    }
  bool stays = taken == wanted && make_entry();
  close(host);
#ifndef ONE_LISTING
  if (stays) {
    list();
    for (int i = 0; i < gpu_count; i++)
      stays = stays && (!gpus[i].chosen || room(i) >= (share ? share : capacity));
  }
#endif
  if (!stays)
    release();
  return stays;
}

int main(int count, char **arguments)
{
  if (count < 7 || count > 6 + GPUS)
    return 64;
  wanted = atoi(arguments[2]);
  share = atoll(arguments[3]);
  capacity = atoll(arguments[4]);
  double deadline = now() + atof(arguments[5]);
  for (int i = 6; i < count; i++) {
    struct gpu *gpu = &gpus[gpu_count++];
    snprintf(gpu->uuid, sizeof gpu->uuid, "%s", arguments[i]);
    gpu->door = gpu->part_door = gpu->part = -1;
  }
  state_fd = open(arguments[1], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  claims_fd = state_fd < 0 ? -1 : openat(state_fd, "claims", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (claims_fd < 0)
    die("%s", arguments[1]);
  while (!claim()) {
    if (now() >= deadline)
      return 75;
    nap(0.0005, 0.01);
  }
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].chosen)
      printf("%s\n", gpus[i].uuid);
  printf("\n");
  fflush(stdout);
  while (getchar() != '\n' && !feof(stdin))
    ;
  release();
  return 0;
}
