/* A second client of safe_gpu/coordination/PROTOCOL.md, written from that page alone.
 *
 *   client -n N -g UUID,UUID,... [-p PRESET] [-t SECONDS] [-f SECONDS] [-s] COMMAND [ARGUMENT ...]
 *
 * It claims N of the GPUs, waits for them in the queue (for ever, or -t seconds), and becomes COMMAND, which then holds
 * the claim. -p: the processes on the GPUs are files of the simulated host PRESET; without it none are known. -f: for
 * how many seconds the GPUs will be held. -s: COMMAND may claim from what this claim holds.
 * Exit: 75 no GPUs, 70 anything else that failed, 64 usage.
 *
 * Left out, as the page allows: the history, places in the queue by date, the job in the record, contexts, shares of
 * GPUs. A host with one GPU and a display is not known here.
 *
 * cc -std=c11 -Wall -Wextra -Werror -o client client.c
 * Builds that must be caught: -DNO_LEASE takes no lease and no name. -DNO_QUEUE ignores those who wait ahead. -DNO_SLOTS
 * does not ask whether claims share a GPU. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <pwd.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 64, UUID_SIZE = 101, TEXT = 64 * 1024, NAMES = 3, TICKETS = 4096, SLOTS = 16 };

struct gpu {
  char uuid[UUID_SIZE];
  bool inside;        /* the outer claim named by SAFE_GPU_SCOPE holds it */
  bool by_name;       /* which was found by its names */
  bool busy;          /* by the last poll of the driver */
  bool held;          /* its lease was held when last tried */
  bool closed;        /* its lease cannot be opened: nobody can claim it */
  long outer_pid;     /* from the record of the outer claim */
  double named_until; /* another process had its name: not tried before then */
  int lease, names[NAMES];
};

struct ticket {
  long number;
  double since, min_memory;
  long pid, pidns;
  int nb_gpus;
  bool readable, strange; /* strange: it has a condition that is not known here */
  const char *gpus; /* the JSON array, in text */
  char text[TEXT + 1];
};

static struct gpu gpus[GPUS];
static int gpu_count, wanted = 1;
static double hold_for = -1, deadline = -1;
static const char *preset;
static char simulated[4096], name_prefix[64], secret[17], token[64], token_hash[17], scope_hash[17], user[65], command[256];
static const char *scope;
static bool named_here; /* the names of the outer claim, if it has any, are those that we can see */
static int state_dir, leases_dir, queue_dir, kept_dir, host_fd = -1;
static bool inner_claim;

static int my_ticket_fd = -1;
static char my_ticket_name[32];
static long my_number;
static struct { long number, pid, pidns; double since; } ahead[TICKETS]; /* who was there when my ticket was taken */
static int ahead_count;

static _Noreturn void die(int code, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  fputs("client: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  exit(code);
}

static void put(char *out, size_t size, const char *format, ...) /* snprintf, cut where there is no room */
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(out, size, format, arguments);
  va_end(arguments);
}

static double seconds(clockid_t clock)
{
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double now(void) { return seconds(CLOCK_MONOTONIC); }

static void nap(double s)
{
  struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
  nanosleep(&t, NULL);
}

/* ---- SHA-256, of which the protocol uses the first 16 hexadecimal digits ---- */

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void hash16(const char *text, char out[17])
{
  static const uint32_t k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};
  uint32_t h[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  size_t length = strlen(text), blocks = (length + 8) / 64 + 1;
  for (size_t block = 0; block < blocks; block++) {
    uint32_t w[64] = {0}, s[8];
    for (size_t i = 0; i < 64; i++) {
      size_t at = block * 64 + i;
      uint64_t byte = at < length ? (unsigned char)text[at] : at == length ? 0x80 : 0;
      if (at >= blocks * 64 - 8) byte = (uint64_t)length * 8 >> 8 * (blocks * 64 - 1 - at) & 0xff;
      w[i / 4] |= (uint32_t)byte << (24 - 8 * (i % 4));
    }
    for (int i = 16; i < 64; i++)
      w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
      uint32_t a = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) +
                   k[i] + w[i];
      uint32_t b = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                   ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      memmove(s + 1, s, 7 * sizeof *s);
      s[4] += a;
      s[0] = a + b;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
  }
  put(out, 17, "%08x%08x", h[0], h[1]);
}

/* ---- JSON: as much as records and tickets need ---- */

static const char *skip_space(const char *p) { return p + strspn(p, " \t\r\n"); }

static const char *skip_string(const char *p) /* behind the closing quote, or NULL */
{
  if (*p++ != '"') return NULL;
  for (; *p && *p != '"'; p++)
    if (*p == '\\' && !*++p) return NULL;
  return *p ? p + 1 : NULL;
}

static const char *skip_value(const char *p) /* behind the value, or NULL */
{
  int depth = 0;
  do {
    p = skip_space(p);
    if (*p == '"') {
      if (!(p = skip_string(p))) return NULL;
    } else if (*p == '{' || *p == '[') {
      depth++, p++;
      continue;
    } else if (*p == '}' || *p == ']') {
      depth--, p++;
    } else if (depth && (*p == ',' || *p == ':')) {
      p++;
      continue;
    } else {
      size_t n = strcspn(p, ",]}: \t\r\n");
      if (!n) return NULL;
      p += n;
    }
    p = skip_space(p);
  } while (depth > 0);
  return depth < 0 ? NULL : p;
}

static const char *find_key(const char *p, const char *key) /* its value in an object that is whole, or NULL */
{
  const char *found = NULL, *start = p = skip_space(p), *end = skip_value(p);
  if (*start != '{' || !end || *skip_space(end)) return NULL;
  for (p = skip_space(p + 1); p && *p == '"'; p = *p == ',' ? skip_space(p + 1) : NULL) {
    const char *name = p + 1, *behind = skip_string(p);
    if (!behind || *(p = skip_space(behind)) != ':') return NULL;
    p = skip_space(p + 1);
    if ((size_t)(behind - name - 1) == strlen(key) && !strncmp(name, key, strlen(key))) found = p;
    if (!(p = skip_value(p))) return NULL;
  }
  return found;
}

static bool has_other_keys(const char *p, const char *const *known) /* an object with a key that is not among these */
{
  const char *end = p ? skip_value(p) : NULL;
  if (!p || !end || *skip_space(p) != '{') return false;
  for (p = skip_space(skip_space(p) + 1); p && *p == '"'; p = p && *p == ',' ? skip_space(p + 1) : NULL) {
    const char *name = p + 1, *behind = skip_string(p);
    const char *value = behind && *(p = skip_space(behind)) == ':' ? skip_space(p + 1) : NULL;
    bool is_known = !value || !strncmp(value, "null", 4);
    for (int i = 0; value && known[i] && !is_known; i++)
      is_known = (size_t)(behind - name - 1) == strlen(known[i]) && !strncmp(name, known[i], strlen(known[i]));
    if (!is_known) return true;
    p = value ? skip_value(value) : NULL;
  }
  return false;
}

static double number(const char *value, double otherwise)
{
  char *end;
  if (!value || !strchr("-0123456789", *value)) return otherwise;
  double x = strtod(value, &end);
  return end == value || x != x ? otherwise : x;
}

static bool string(const char *value, char *out, size_t size) /* cut to size; escapes become a question mark */
{
  size_t n = 0;
  if (!value || !skip_string(value)) return false;
  for (value++; *value != '"'; value++) {
    bool escaped = *value == '\\' && *++value != '/';
    if (n + 1 < size) out[n++] = escaped ? '?' : *value;
  }
  out[n] = 0;
  return true;
}

static const char *first(const char *array) { return array && *array == '[' ? skip_space(array + 1) : NULL; }

static const char *next(const char *element)
{
  const char *p = element ? skip_value(element) : NULL;
  return p && *p == ',' ? skip_space(p + 1) : NULL;
}

static void write_string(FILE *out, const char *s) /* bytes that are not UTF-8 become U+FFFD */
{
  fputc('"', out);
  while (*s) {
    unsigned char c = (unsigned char)*s;
    int more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
    bool good = more >= 0;
    for (int i = 1; good && i <= more; i++) good = ((unsigned char)s[i] & 0xc0) == 0x80;
    if (good && more > 1) { /* neither overlong, nor a surrogate, nor beyond U+10FFFF */
      unsigned char d = (unsigned char)s[1];
      good = !(c == 0xe0 && d < 0xa0) && !(c == 0xed && d > 0x9f) && !(c == 0xf0 && d < 0x90) && !(c == 0xf4 && d > 0x8f);
    }
    if (!good) fputs("\\ufffd", out);
    else if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f) fprintf(out, "\\u%04x", c);
    else fwrite(s, 1, (size_t)more + 1, out);
    s += good ? more + 1 : 1;
  }
  fputc('"', out);
}

/* ---- files and directories ---- */

static bool local_file_system(int fd)
{
  static const unsigned long remote[] = {0x6969, 0xff534d42, 0xfe534d42, 0x517b, 0x0bd00bd0, 0x00c36400,
                                         0x5346414f, 0x01021997, 0x47504653, 0x19830326};
  struct statfs s;
  if (fstatfs(fd, &s)) return false;
  for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
    if (((unsigned long)s.f_type & 0xffffffff) == remote[i]) return false;
  return true;
}

static bool is_empty(int fd)
{
  int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), n = 0;
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  while (d && readdir(d)) n++;
  if (d) closedir(d);
  return n == 2;
}

static bool open_up(int parent, const char *name) /* by descriptor: the name may be a link by now */
{
  struct stat s;
  int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  bool done = fd >= 0 && !fstat(fd, &s) && s.st_uid == geteuid() && is_empty(fd) && !fchmod(fd, 01777);
  if (fd >= 0) close(fd);
  return done;
}

static void make_directory(int parent, const char *name)
{
  char hidden[64];
  put(hidden, sizeof hidden, ".new-%ld", (long)getpid());
  if (mkdirat(parent, hidden, 0700)) return;
  if (open_up(parent, hidden) && renameat2(parent, hidden, parent, name, RENAME_NOREPLACE) == 0) return;
  int error = errno;
  unlinkat(parent, hidden, AT_REMOVEDIR);
  if ((error == EINVAL || error == ENOSYS) && mkdirat(parent, name, 01777) == 0) open_up(parent, name);
}

static int open_directory(int parent, const char *name)
{
  struct stat s;
  int error = 0;
  for (double until = now() + 1; now() < until; nap(0.01)) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
      make_directory(parent, name);
      fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    error = errno;
    if (fd >= 0 && !fstat(fd, &s)) {
      if (!local_file_system(fd)) die(70, "%s is not on a local file system", name);
      if (s.st_uid == geteuid()) {
        if ((s.st_mode & 07777) != 01777 && is_empty(fd)) fchmod(fd, 01777);
        return fd;
      }
      if ((s.st_mode & 07777) == 01777 || faccessat(fd, ".", W_OK | X_OK, AT_EACCESS) == 0) return fd;
      error = EACCES;
    }
    if (fd >= 0) close(fd);
    if (error != EACCES && error != ENOENT) break;
  }
  die(70, "the directory %s cannot be used: %s", name, strerror(error));
}

static const char *absolute(const char *path) /* without a slash at its end; other spellings are refused */
{
  static char copies[2][4096];
  static int which;
  char *copy = copies[which++ % 2];
  size_t n = strlen(path);
  if (*path != '/' || n > 4000) die(70, "%s is not an absolute path", path);
  strcpy(copy, path);
  while (n > 1 && copy[n - 1] == '/') copy[--n] = 0;
  if (strstr(copy, "//") || strstr(copy, "/./") || strstr(copy, "/../")) die(70, "%s can be written more simply", path);
  return copy;
}

static int open_state_dir(void)
{
  const char *given = getenv("SAFE_GPU_DIR"), *own = getenv("SAFE_GPU_SIMULATED_DIR");
  const char *path = absolute(given && *given ? given : "/tmp/safe-gpu");
  if (own && *own) put(simulated, sizeof simulated, "%s", absolute(own));
  else put(simulated, sizeof simulated, "%s/simulated", path);
  char parent[4096], *slash;
  strcpy(parent, path);
  slash = strrchr(parent, '/');
  *slash = 0;
  int fd = open(slash == parent ? "/" : parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) die(70, "%s: %s", parent, strerror(errno));
  int state = open_directory(fd, slash + 1);
  close(fd);
  return state;
}

static int open_existing(int dir, const char *name) /* -1: errno; EPERM is a file that is not to be opened */
{
  struct stat s;
  if (fstatat(dir, name, &s, AT_SYMLINK_NOFOLLOW)) return -1;
  if (!S_ISREG(s.st_mode)) return errno = EPERM, -1;
  int fd = openat(dir, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return -1;
  if (fstat(fd, &s) || s.st_mode != (S_IFREG | 0666)) return close(fd), errno = EPERM, -1; /* linked or moved here */
  return fd;
}

static void lease_name(char out[160], const char *uuid, bool inner)
{
  put(out, 160, "%s%s.lock", uuid, inner ? ".inner" : "");
  for (char *p = out; *p; p++)
    if (*p == '/') *p = '_';
}

static bool same_file(int dir, const char *name, const struct stat *s)
{
  struct stat other;
  return !fstatat(dir, name, &other, AT_SYMLINK_NOFOLLOW) && other.st_ino == s->st_ino && other.st_dev == s->st_dev;
}

static int open_lease(const char *name) /* like open_existing; a link to host.lock or to another lease is refused */
{
  struct stat s;
  int fd = open_existing(leases_dir, name);
  if (fd < 0 || fstat(fd, &s) || s.st_nlink < 2) return fd;
  bool linked = same_file(state_dir, "host.lock", &s);
  for (int i = 0; i < 2 * gpu_count && !linked; i++) {
    char other[160];
    lease_name(other, gpus[i / 2].uuid, i % 2);
    linked = strcmp(name, other) && same_file(leases_dir, other, &s);
  }
  return linked ? close(fd), errno = EPERM, -1 : fd;
}

static bool make_file(int dir, const char *name, mode_t mode) /* false: errno, EEXIST among them */
{
  char path[64];
  int fd = openat(dir, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, mode), result;
  if (fd >= 0) {
    put(path, sizeof path, "/proc/self/fd/%d", fd);
    result = fchmod(fd, mode) || linkat(AT_FDCWD, path, dir, name, AT_SYMLINK_FOLLOW);
  } else {
    put(path, sizeof path, ".new-%ld", (long)getpid());
    fd = openat(dir, path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    result = fchmod(fd, mode) || renameat2(dir, path, dir, name, RENAME_NOREPLACE);
    int error = errno;
    if (result) unlinkat(dir, path, 0);
    errno = error;
  }
  int error = errno;
  close(fd);
  errno = error;
  return !result;
}

static int open_file(int dir, const char *name) /* makes it where it is missing; -1: errno */
{
  for (int i = 0; i < 100; i++) {
    int fd = dir == leases_dir ? open_lease(name) : open_existing(dir, name);
    if (fd >= 0 || errno != ENOENT) return fd;
    if (!make_file(dir, name, 0666) && errno != EEXIST) die(70, "%s cannot be made: %s", name, strerror(errno));
  }
  die(70, "%s is removed again and again", name);
}

static bool stands_there(int fd, int dir, const char *name)
{
  struct stat a, b;
  return !fstat(fd, &a) && !fstatat(dir, name, &b, AT_SYMLINK_NOFOLLOW) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static void give_back(int *fd) /* unlock before close: a forked child may have a copy */
{
  if (*fd >= 0) flock(*fd, LOCK_UN), close(*fd);
  *fd = -1;
}

static const char *read_text(int fd, char text[TEXT + 1])
{
  for (int i = 0; i < 5; i++) {
    ssize_t n = pread(fd, text, TEXT, 0);
    text[n > 0 ? n : 0] = 0;
    if (n <= 0 || text[n - 1] == '\n') break;
  }
  return text;
}

static bool write_text(int fd, const char *text)
{
  size_t length = strlen(text);
  return pwrite(fd, text, length, 0) == (ssize_t)length && ftruncate(fd, (off_t)length) == 0;
}

static void lock_host(void)
{
  double began = now();
  for (;;) {
    host_fd = open_file(state_dir, "host.lock");
    if (host_fd < 0) die(70, "host.lock cannot be opened: %s", strerror(errno));
    while (flock(host_fd, LOCK_EX | LOCK_NB)) {
      double waited = now() - began;
      if (waited > 60) die(70, "host.lock is held for a minute");
      nap(waited < 0.1 ? 0.001 + (double)(getpid() % 5) / 1000 : waited < 1 ? 0.01 : 0.05);
    }
    if (stands_there(host_fd, state_dir, "host.lock")) return;
    give_back(&host_fd);
  }
}

static void unlock_host(void) { give_back(&host_fd); }

/* ---- what the kernel says about processes, locks and names ---- */

struct stat_line {
  char state;
  long parent;
  unsigned long flags;
  long threads;
  unsigned long long start;
};

static bool stat_of(long pid, struct stat_line *s)
{
  char path[64], text[4097];
  put(path, sizeof path, "/proc/%ld/stat", pid);
  FILE *f = fopen(path, "re");
  size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
  if (f) fclose(f);
  text[n] = 0;
  char *p = strrchr(text, ')');
  return p && sscanf(p + 1, " %c %ld %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu", &s->state,
                     &s->parent, &s->flags, &s->threads, &s->start) == 5;
}

static bool has_ended(long pid, double start) /* start < 0: not known */
{
  struct stat_line s;
  bool there = stat_of(pid, &s) && (s.threads > 1 || (s.state != 'Z' && s.state != 'X'));
  return !there || (start >= 0 && (double)s.start != start);
}

static bool is_leaving(long pid)
{
  struct stat_line s;
  struct dirent *thread;
  bool lives = false;
  char path[64];
  put(path, sizeof path, "/proc/%ld/task", pid);
  DIR *threads = opendir(path);
  while (threads && (thread = readdir(threads)))
    lives |= thread->d_name[0] != '.' && stat_of(atol(thread->d_name), &s) && !(s.flags & 4);
  if (threads) closedir(threads);
  return !lives;
}

static bool is_stopped(long pid)
{
  char path[4200], line[4096];
  struct stat_line s;
  bool frozen = false;
  if (!stat_of(pid, &s)) return false;
  if (s.state == 'T') return true;
  put(path, sizeof path, "/proc/%ld/cgroup", pid);
  FILE *f = fopen(path, "re");
  while (f && fgets(line, sizeof line, f)) {
    if (strncmp(line, "0::", 3)) continue;
    line[strcspn(line, "\n")] = 0;
    put(path, sizeof path, "/sys/fs/cgroup%s/cgroup.events", line + 3);
    FILE *events = fopen(path, "re");
    while (events && fgets(line, sizeof line, events)) frozen |= !strcmp(line, "frozen 1\n");
    if (events) fclose(events);
    break;
  }
  if (f) fclose(f);
  return frozen;
}

static long own_pidns(void)
{
  struct stat s;
  return stat("/proc/self/ns/pid", &s) ? -1 : (long)s.st_ino;
}

static bool is_here(const char *text) /* whether the pid in a record or a ticket is one of this PID namespace */
{
  double pidns = number(find_key(text, "pidns"), -1);
  return pidns < 0 || pidns == (double)own_pidns();
}

static bool is_mine(long pid) /* a process with our effective uid */
{
  char path[64], line[256];
  unsigned uid = 0;
  bool found = false;
  put(path, sizeof path, "/proc/%ld/status", pid);
  FILE *f = fopen(path, "re");
  while (f && !found && fgets(line, sizeof line, f)) found = sscanf(line, "Uid: %*u %u", &uid) == 1;
  if (f) fclose(f);
  return found && uid == geteuid();
}

static bool lock_line(const char *line, const struct stat *s, long *pid) /* a line of /proc/locks or of an fdinfo */
{
  unsigned major_, minor_;
  unsigned long inode;
  const char *p = strstr(line, "FLOCK");
  return p && sscanf(p, "FLOCK %*s %*s %ld %x:%x:%lu", pid, &major_, &minor_, &inode) == 4 &&
         inode == (unsigned long)s->st_ino && makedev(major_, minor_) == s->st_dev;
}

static long holder(int fd) /* the process that /proc/locks names, or 0 */
{
  struct stat s;
  char line[512];
  long pid = 0;
  FILE *f = fopen("/proc/locks", "re");
  if (fstat(fd, &s)) return 0;
  while (f && fgets(line, sizeof line, f))
    if (!strstr(line, "->") && lock_line(line, &s, &pid)) break;
    else pid = 0;
  if (f) fclose(f);
  return pid > 0 ? pid : 0;
}

/* Whether some process of ours shows, in its folder ("fdinfo" or "fd"), the lock of a file or a socket. */
static bool one_of_mine_has(const char *folder, const struct stat *lock, const char *socket)
{
  char path[512], text[512];
  bool found = false;
  struct dirent *entry, *file;
  DIR *proc = opendir("/proc");
  while (proc && !found && (entry = readdir(proc))) {
    long pid = atol(entry->d_name), named;
    if (pid <= 0 || !is_mine(pid)) continue;
    put(path, sizeof path, "/proc/%ld/%s", pid, folder);
    DIR *files = opendir(path);
    for (int n = 0; files && !found && n < 4096 && (file = readdir(files)); n++) {
      put(path, sizeof path, "/proc/%ld/%s/%.40s", pid, folder, file->d_name);
      if (socket) {
        ssize_t length = readlink(path, text, sizeof text - 1);
        text[length > 0 ? length : 0] = 0;
        found = !strcmp(text, socket);
        continue;
      }
      FILE *f = fopen(path, "re");
      while (f && !found && fgets(text, sizeof text, f)) found = lock_line(text, lock, &named);
      if (f) fclose(f);
    }
    if (files) closedir(files);
  }
  if (proc) closedir(proc);
  return found;
}

static void name_of(char out[108], const struct gpu *gpu, const char *suffix)
{
  char uuid[UUID_SIZE];
  strcpy(uuid, gpu->uuid);
  for (char *p = uuid; *p; p++)
    if (*p == '/') *p = '_';
  put(out, 108, "safe-gpu/1/%s%s%s", name_prefix, uuid, suffix);
  size_t n = strlen(out);
  while (n < 48) out[n++] = '.';
  out[n] = 0;
}

static socklen_t address_of(struct sockaddr_un *address, const struct gpu *gpu, const char *suffix) /* its length */
{
  char name[108];
  name_of(name, gpu, suffix);
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name, strlen(name) < 107 ? strlen(name) : 107);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static bool is_named(const struct gpu *gpu, const char *suffix) /* of a datagram socket */
{
  struct sockaddr_un address;
  socklen_t length = address_of(&address, gpu, suffix);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool held = fd >= 0 && (!connect(fd, (void *)&address, length) || errno != ECONNREFUSED);
  if (fd >= 0) close(fd);
  return held;
}

static bool is_shared(const struct gpu *gpu) /* whether a claim has the name of a share */
{
#ifdef NO_SLOTS
  return false && gpu;
#endif
  struct sockaddr_un address;
  bool held = false;
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  for (int i = 0; i < SLOTS && fd >= 0 && !held; i++) {
    char suffix[20];
    put(suffix, sizeof suffix, ".share.%d", i);
    socklen_t length = address_of(&address, gpu, suffix);
    held = !connect(fd, (void *)&address, length) || errno != ECONNREFUSED;
  }
  if (fd >= 0) close(fd);
  return held;
}

static int bind_name(const struct gpu *gpu, const char *suffix) /* -1: another has it; -2: names cannot be had */
{
  struct sockaddr_un address;
  socklen_t length = address_of(&address, gpu, suffix);
  bool datagrams = !strcmp(suffix, ".outer");
  int fd = socket(AF_UNIX, (datagrams ? SOCK_DGRAM : SOCK_STREAM) | SOCK_CLOEXEC, 0);
  if (fd >= 0 && !bind(fd, (void *)&address, length)) {
    if (datagrams) shutdown(fd, SHUT_RDWR);
    return fd;
  }
  int error = errno;
  if (fd >= 0) close(fd);
  if (error == EADDRINUSE) return -1;
  fprintf(stderr, "client: no name for %s: %s\n", gpu->uuid, strerror(error));
  return -2;
}

/* The socket with this name and whether our effective user has made it, as the kernel tells by NETLINK_SOCK_DIAG: its
 * inode, or 0. No lock is held. */
static unsigned long socket_with(const struct gpu *gpu, const char *suffix, bool *mine)
{
  struct { struct nlmsghdr head; struct unix_diag_req body; } request = {
    {sizeof request, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0},
    {.sdiag_family = AF_UNIX, .udiag_states = ~0U, /* a datagram socket is "established" once anybody connected to it */
     .udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_UID}};
  static char answer[1 << 15] __attribute__((aligned(NLMSG_ALIGNTO)));
  char name[109] = "", nobody[16] = "", socket_text[64];
  unsigned long found = 0;
  int type = strcmp(suffix, ".outer") ? SOCK_STREAM : SOCK_DGRAM;
  bool more = true;
  name_of(name + 1, gpu, suffix);
  FILE *f = fopen("/proc/sys/kernel/overflowuid", "re");
  if (f && !fgets(nobody, sizeof nobody, f)) *nobody = 0;
  if (f) fclose(f);
  int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  more = fd >= 0 && send(fd, &request, sizeof request, 0) == sizeof request;
  while (more && !found) {
    ssize_t length = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
    if (length <= 0) break;
    for (struct nlmsghdr *head = (void *)answer; more && NLMSG_OK(head, length); head = NLMSG_NEXT(head, length)) {
      struct unix_diag_msg *message = NLMSG_DATA(head);
      bool is_it = false, known = false;
      uint32_t uid = 0;
      more = head->nlmsg_type == SOCK_DIAG_BY_FAMILY;
      size_t at = NLMSG_ALIGN(sizeof *message), end = more ? head->nlmsg_len - NLMSG_HDRLEN : 0;
      while (at + NLA_HDRLEN <= end) {
        struct nlattr *one = (void *)((char *)message + at);
        size_t size = one->nla_len - (size_t)NLA_HDRLEN;
        const char *value = (char *)one + NLA_HDRLEN;
        if (one->nla_type == UNIX_DIAG_NAME) is_it = size == 1 + strlen(name + 1) && !memcmp(value, name, size);
        if (one->nla_type == UNIX_DIAG_UID) memcpy(&uid, value, sizeof uid), known = uid != strtoul(nobody, NULL, 10);
        at += NLA_ALIGN(one->nla_len);
      }
      if (!is_it || message->udiag_type != type || (type == SOCK_STREAM && message->udiag_state == 1)) continue; /* a connection */
      put(socket_text, sizeof socket_text, "socket:[%u]", message->udiag_ino);
      *mine = known ? uid == geteuid() : one_of_mine_has("fd", NULL, socket_text);
      found = message->udiag_ino;
    }
  }
  if (fd >= 0) close(fd);
  return found;
}

static void hash_suffix(char suffix[20], const char *text, unsigned long inode) /* of the name that says whose a socket is */
{
  char with_inode[512], hash[17];
  put(with_inode, sizeof with_inode, "%s:%lu", text, inode);
  hash16(with_inode, hash);
  put(suffix, 20, ".%s", hash);
}

static bool is_in_scope(const struct gpu *gpu) /* our outer claim holds it by name */
{
  char suffix[20];
  bool mine = false, any;
  unsigned long inode = socket_with(gpu, ".outer", &mine);
  hash_suffix(suffix, scope, inode);
  return mine && socket_with(gpu, suffix, &any);
}

/* ---- the driver ---- */

static double polled = -1e9;
static struct { char uuid[UUID_SIZE]; long pid; long long drawn; } on_gpu[1024]; /* drawn: bytes, if it only draws */
static int on_gpu_count;

static void judge_gpus(void) /* which are busy by the last poll */
{
  for (int i = 0; i < gpu_count; i++) {
    gpus[i].busy = false;
    for (int j = 0; j < on_gpu_count; j++)
      gpus[i].busy |= !strcmp(on_gpu[j].uuid, gpus[i].uuid) && on_gpu[j].pid != getpid() &&
                      !(inner_claim && on_gpu[j].pid == gpus[i].outer_pid);
  }
}

static void forget_small_drawers(void) /* those that only draw, and use at most 1 GiB together on a GPU */
{
  int kept = 0;
  long long drawn[1024];
  for (int i = 0; i < on_gpu_count; i++) {
    drawn[i] = 0;
    for (int j = 0; j < on_gpu_count; j++)
      if (!strcmp(on_gpu[j].uuid, on_gpu[i].uuid)) drawn[i] += on_gpu[j].drawn;
  }
  for (int i = 0; i < on_gpu_count; i++)
    if (!on_gpu[i].drawn || drawn[i] > 1LL << 30) on_gpu[kept++] = on_gpu[i];
  on_gpu_count = kept;
}

static void poll_driver(void) /* fills on_gpu: who has a context on which GPU */
{
  char path[4200];
  polled = now();
  on_gpu_count = 0;
  if (!preset) return;
  put(path, sizeof path, "%.4000s/%.100s", simulated, preset);
  DIR *d = opendir(path);
  for (struct dirent *entry; d && (entry = readdir(d));) {
    long pid;
    long long memory;
    char *dot = strchr(entry->d_name, '.');
    if (!dot || dot == entry->d_name || dot - entry->d_name >= UUID_SIZE) continue;
    if (sscanf(dot, ".%ld-%lld-", &pid, &memory) != 2) continue;
    int fd = openat(dirfd(d), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_SH | LOCK_NB) && on_gpu_count < 1024) {
      put(on_gpu[on_gpu_count].uuid, UUID_SIZE, "%.*s", (int)(dot - entry->d_name), entry->d_name);
      on_gpu[on_gpu_count].drawn = strstr(dot, "-graphics-") ? memory : 0;
      on_gpu[on_gpu_count++].pid = pid;
    }
    give_back(&fd);
  }
  if (d) closedir(d);
  forget_small_drawers();
  judge_gpus();
}

static bool someone_on(const char *uuid, long pid) /* pid 0: anybody */
{
  for (int i = 0; i < on_gpu_count; i++)
    if (!strcmp(on_gpu[i].uuid, uuid) && (!pid || on_gpu[i].pid == pid)) return true;
  return false;
}

/* ---- leases ---- */

static char scratch[TEXT + 1];

static void clear_ended_record(int fd, const char *uuid) /* the lease is locked by us */
{
  const char *record = read_text(fd, scratch);
  double pid = number(find_key(record, "pid"), 0), start = number(find_key(record, "start"), -1);
  if (pid < 1 || pid > 2147483647 || !is_here(record)) return;
  if (has_ended((long)pid, start) && !someone_on(uuid, (long)pid)) (void)!ftruncate(fd, 0);
}

static bool is_held(const char *uuid, bool inner) /* under host.lock */
{
  char name[160];
  lease_name(name, uuid, inner);
  int fd = open_lease(name);
  if (fd < 0) return errno != ENOENT;
  bool held = flock(fd, LOCK_EX | LOCK_NB) != 0;
  if (!held && !inner) clear_ended_record(fd, uuid);
  if (held) close(fd); else give_back(&fd);
  return held;
}

static int take_lease(const struct gpu *gpu, bool inner) /* under host.lock; -1: held; -2: it cannot be opened */
{
  char name[160];
  lease_name(name, gpu->uuid, inner);
  for (;;) {
    int fd = open_file(leases_dir, name);
    if (fd < 0) return -2;
    if (flock(fd, LOCK_EX | LOCK_NB)) return close(fd), -1;
    if (stands_there(fd, leases_dir, name)) return fd;
    give_back(&fd);
  }
}

static void close_names(struct gpu *gpu)
{
  for (int i = NAMES - 1; i >= 0; i--) {
    if (gpu->names[i] >= 0) close(gpu->names[i]);
    gpu->names[i] = -1;
  }
}

static void release(struct gpu *gpu)
{
  if (gpu->lease >= 0) (void)!ftruncate(gpu->lease, 0);
  close_names(gpu);
  give_back(&gpu->lease);
}

static void write_gpus(FILE *out, bool all, const char *suffix)
{
  bool comma = false;
  fputs("\"gpus\":[", out);
  for (int i = 0; i < gpu_count; i++) {
    char text[UUID_SIZE + 8];
    if (all ? inner_claim && !gpus[i].inside : gpus[i].lease < 0) continue;
    put(text, sizeof text, "%s%s", gpus[i].uuid, suffix);
    if (comma) fputc(',', out);
    write_string(out, text);
    comma = true;
  }
  fputc(']', out);
}

static bool write_records(void)
{
  char *text = NULL, host[256] = "";
  size_t size;
  struct stat_line own;
  double since = seconds(CLOCK_REALTIME);
  bool good = true;
  gethostname(host, sizeof host - 1);
  FILE *out = open_memstream(&text, &size);
  if (!out) return false;
  fprintf(out, "{\"v\":1,\"pid\":%ld,\"start\":", (long)getpid());
  if (stat_of(getpid(), &own)) fprintf(out, "%llu", own.start); else fputs("null", out);
  fprintf(out, ",\"uid\":%ld,\"user\":", (long)geteuid());
  write_string(out, user);
  fputs(",\"host\":", out);
  write_string(out, host);
  fputs(",\"job\":null,\"command\":", out);
  write_string(out, command);
  fputc(',', out);
  write_gpus(out, false, "");
  fprintf(out, ",\"since\":%.3f,\"until\":", since);
  if (hold_for >= 0) fprintf(out, "%.3f", since + hold_for); else fputs("null", out);
  fprintf(out, ",\"token\":\"%s\",\"pidns\":%ld}\n", inner_claim ? "" : token_hash, own_pidns());
  if (fclose(out)) return false;
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].lease >= 0) good &= write_text(gpus[i].lease, text);
  free(text);
  return good;
}

static bool has_fault(const struct gpu *gpu)
{
  char name[160], text[4097];
  lease_name(name, gpu->uuid, false);
  strcpy(strrchr(name, '.'), ".fault");
  int fd = open_lease(name);
  if (fd < 0) return false;
  ssize_t n = pread(fd, text, sizeof text - 1, 0);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  double age = seconds(CLOCK_REALTIME) - number(find_key(text, "when"), 0);
  return age > -600 && age < 600;
}

static int by_uuid(const void *a, const void *b) { return strcmp((*(struct gpu *const *)a)->uuid, (*(struct gpu *const *)b)->uuid); }

static unsigned long namespace_of_names(void)
{
  struct stat s;
  return stat("/proc/self/ns/net", &s) ? 0 : (unsigned long)s.st_ino;
}

static void new_token(unsigned long place) /* of the network namespace in which its names are; 0: it has none */
{
  put(token, sizeof token, "%s@%lu", secret, place);
  hash16(token, token_hash);
}

/* The names by which claims inside this one find it. -1: another has one; -2: names cannot be had. */
static int bind_outer(struct gpu *gpu)
{
  struct stat s;
  char suffix[20];
  if ((gpu->names[1] = bind_name(gpu, ".outer")) < 0 || fstat(gpu->names[1], &s)) return gpu->names[1];
  hash_suffix(suffix, token, (unsigned long)s.st_ino);
  return gpu->names[2] = bind_name(gpu, suffix);
}

/* Names for the GPUs whose leases we hold. NULL, or the GPU that another process has. */
static struct gpu *bind_names(void)
{
  struct gpu *sorted[GPUS];
  int n = 0;
  bool without = false;
  if (*token_hash) new_token(namespace_of_names());
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].lease >= 0) sorted[n++] = &gpus[i];
  qsort(sorted, (size_t)n, sizeof *sorted, by_uuid);
  for (int i = 0; i < n; i++) {
    struct gpu *gpu = sorted[i];
    if (inner_claim && (gpu->names[1] = bind_name(gpu, ".inner")) == -1) return gpu;
    if (inner_claim && gpu->by_name) {
      if (!is_named(gpu, ".outer")) return gpu;
      continue;
    }
    int bound = gpu->names[0] = bind_name(gpu, "");
    if (bound == -1 || is_named(gpu, ".outer")) return gpu; /* asked before .inner, which one inside it has by then */
    int moment = inner_claim ? -2 : bind_name(gpu, ".inner");
    if (moment == -1) return gpu;
    if (moment >= 0) close(moment);
    if (is_shared(gpu)) return gpu;
    if (*token_hash && !inner_claim && bound >= 0 && (bound = bind_outer(gpu)) == -1) return gpu;
    without |= bound < 0;
  }
  for (int i = 0; i < n && without && *token_hash; i++) close_names(sorted[i]); /* all or none */
  if (without && *token_hash) new_token(0);
  return NULL;
}

/* Which GPUs the outer claim named by SAFE_GPU_SCOPE holds, as the same user. Without host.lock. */
static void look_for_scope(void)
{
  bool named = false;
  for (int i = 0; i < gpu_count; i++) named |= gpus[i].by_name = gpus[i].inside = named_here && is_in_scope(&gpus[i]);
  for (int i = 0; i < gpu_count; i++) {
    char name[160], hash[20] = "";
    struct stat s;
    lease_name(name, gpus[i].uuid, false);
    int fd = open_lease(name);
    if (fd < 0) continue;
    const char *record = read_text(fd, scratch);
    if (string(find_key(record, "token"), hash, sizeof hash) && !strcmp(hash, scope_hash)) {
      long pid = named ? 0 : holder(fd);
      bool dead = !pid || (kill((pid_t)pid, 0) && errno == ESRCH);
      gpus[i].outer_pid = (long)number(find_key(record, "pid"), 0);
      if (!named && dead) gpus[i].inside = !fstat(fd, &s) && one_of_mine_has("fdinfo", &s, NULL); /* inherited */
      if (!named && !named_here && !gpus[i].inside)
        gpus[i].inside = pid ? !dead && is_mine(pid) : number(find_key(record, "uid"), -1) == (double)geteuid();
    }
    close(fd);
  }
}

static bool is_still_inside(void) /* host.lock is free again: it was not known whose the name was that we asked for */
{
  for (int i = 0; i < gpu_count; i++)
    if (inner_claim && gpus[i].lease >= 0 && gpus[i].by_name && !is_in_scope(&gpus[i])) return false;
  return true;
}

/* Leases and names of `wanted` GPUs, with records, or nothing. Under host.lock. */
static bool take(void)
{
#ifdef NO_LEASE
  int n = 0;
  for (int i = 0; i < gpu_count; i++) gpus[i].lease = -1;
  for (int i = 0; i < gpu_count && n < wanted; i++)
    if (!gpus[i].busy) gpus[i].lease = open("/dev/null", O_RDWR | O_CLOEXEC), n++;
  return n == wanted;
#endif
  for (int i = 0; i < gpu_count; i++) gpus[i].held = false;
  for (;;) {
    int got = 0;
    for (int bad = 0; bad < 2; bad++)
      for (int i = 0; i < gpu_count && got < wanted; i++) {
        struct gpu *gpu = &gpus[i];
        if (gpu->lease >= 0 || gpu->busy || gpu->held || gpu->named_until > now() || (inner_claim && !gpu->inside)) continue;
        if (has_fault(gpu) != (bool)bad) continue;
        gpu->lease = take_lease(gpu, inner_claim);
        gpu->closed = gpu->lease == -2;
        if (gpu->lease >= 0 && !inner_claim && is_held(gpu->uuid, true)) give_back(&gpu->lease);
        if (gpu->lease >= 0) got++; else gpu->held = true;
      }
    struct gpu *taken = got == wanted ? bind_names() : NULL;
    if (got == wanted && !taken) {
      if (write_records()) return true;
      for (int i = 0; i < gpu_count; i++) release(&gpus[i]);
      die(70, "the record cannot be written: %s", strerror(errno));
    }
    if (taken) taken->named_until = now() + 1;
    for (int i = 0; i < gpu_count; i++) {
      close_names(&gpus[i]);
      give_back(&gpus[i].lease);
    }
    if (!taken) return false;
  }
}

/* ---- the queue ---- */

static bool ticket_number(const char *name, long *value)
{
  size_t digits = strspn(name, "0123456789");
  if (!digits || digits > 18 || strcmp(name + digits, ".ticket") || (*name == '0' && digits > 1)) return false;
  *value = atol(name);
  return true;
}

struct place { long number; ino_t inode; uid_t user; bool counts; };

static int by_number(const void *a, const void *b)
{
  const struct place *x = a, *y = b;
  return x->number < y->number ? -1 : x->number > y->number;
}

static int by_inode(const void *a, const void *b)
{
  const struct place *x = a, *y = b;
  return x->inode < y->inode ? -1 : x->inode > y->inode ? 1 : by_number(a, b);
}

/* Where there are more than a thousand: the first name of each ticket, and of one user a thousand. */
static void thin_out(struct place *list, int n)
{
  struct { uid_t user; int tickets; } users[256];
  int known = 0;
  for (int i = 0; i < n; i++) {
    char name[32];
    struct stat s;
    put(name, sizeof name, "%ld.ticket", list[i].number);
    list[i].counts = !fstatat(queue_dir, name, &s, AT_SYMLINK_NOFOLLOW) && s.st_mode == (S_IFREG | 0644);
    list[i].inode = list[i].counts ? s.st_ino : 0;
    list[i].user = s.st_uid;
  }
  qsort(list, (size_t)n, sizeof *list, by_inode);
  for (int i = n - 1; i > 0; i--)
    if (list[i].inode == list[i - 1].inode) list[i].counts = false;
  qsort(list, (size_t)n, sizeof *list, by_number);
  for (int i = 0; i < n; i++) {
    int k = 0;
    if (!list[i].counts || list[i].user == 0) continue;
    while (k < known && users[k].user != list[i].user) k++;
    if (k == 256) continue;
    if (k == known) users[known].user = list[i].user, users[known++].tickets = 0;
    list[i].counts = ++users[k].tickets <= 1000;
  }
}

static int list_tickets(struct place **numbers) /* upward, up to a gap that no queue makes */
{
  int n = 0, room = 64, copy = openat(queue_dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  long before = 0;
  struct place *list = calloc((size_t)room, sizeof *list);
  DIR *d = copy < 0 ? NULL : fdopendir(copy);
  if (!d || !list) die(70, "the queue cannot be read");
  for (struct dirent *entry; (entry = readdir(d));) {
    if (n == room && !(list = realloc(list, (size_t)(room *= 2) * sizeof *list))) die(70, "no memory");
    list[n].counts = true;
    if (ticket_number(entry->d_name, &list[n].number)) n++;
  }
  closedir(d);
  qsort(list, (size_t)n, sizeof *list, by_number);
  for (int i = 0; i < n; before = list[i++].number)
    if (list[i].number - before > 1000000000000) n = i;
  if (n > 1000) thin_out(list, n);
  *numbers = list;
  return n;
}

static int open_live(long n, struct ticket *ticket) /* -1: dead, and removed where we may */
{
  char name[32];
  put(name, sizeof name, "%ld.ticket", n);
  struct stat s;
  int fd = openat(queue_dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return -1;
  if (fstat(fd, &s) || s.st_mode != (S_IFREG | 0644)) return close(fd), -1; /* a link to a lock, or anything else */
  if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
    unlinkat(queue_dir, name, 0);
    give_back(&fd);
    return -1;
  }
  const char *text = read_text(fd, ticket->text), *request = find_key(text, "request");
  char *copy = request ? strndup(request, (size_t)(skip_value(request) - request)) : NULL;
  const char *array = copy ? find_key(copy, "gpus") : NULL;
  double nb = copy ? number(find_key(copy, "nb_gpus"), 0) : 0, memory = copy ? number(find_key(copy, "min_memory"), 0) : 0;
  ticket->number = n;
  ticket->since = number(find_key(text, "since"), -1);
  ticket->pid = (long)number(find_key(text, "pid"), -1);
  ticket->pidns = (long)number(find_key(text, "pidns"), -1);
  ticket->nb_gpus = nb >= 1 && nb <= 4096 ? (int)nb : 0;
  ticket->readable = ticket->nb_gpus && memory >= 0 && memory <= (double)(1L << 60) && array && *array == '[';
  ticket->gpus = ticket->readable ? request + (array - copy) : NULL;
  ticket->strange = has_other_keys(copy, (const char *const[]){"nb_gpus", "gpus", "min_memory", NULL});
  free(copy);
  return fd;
}

static bool competes(const struct ticket *ticket)
{
  if (!ticket->readable) return true;
  for (const char *e = first(ticket->gpus); e; e = next(e)) {
    char theirs[UUID_SIZE], ours[UUID_SIZE + 8];
    if (!string(e, theirs, sizeof theirs)) continue;
    for (int i = 0; i < gpu_count; i++) {
      if (inner_claim && !gpus[i].inside) continue;
      put(ours, sizeof ours, "%s%s", gpus[i].uuid, inner_claim ? ".inner" : "");
      if (!strncmp(ours, theirs, UUID_SIZE - 1)) return true;
    }
  }
  return false;
}

static bool is_absent(const struct ticket *ticket) /* stopped, or kept waiting by a stranger */
{
  int possible = 0, instances = 0;
  if (!ticket->readable) return false;
  if (ticket->pid > 0 && is_here(ticket->text) && is_stopped(ticket->pid)) return true;
  if (ticket->strange) return false;
  for (const char *e = first(ticket->gpus); e; e = next(e)) {
    char uuid[UUID_SIZE], name[160];
    if (!string(e, uuid, sizeof uuid)) continue;
    size_t length = strlen(uuid);
    bool inner = length > 6 && !strcmp(uuid + length - 6, ".inner"), counts = inner || !someone_on(uuid, 0) || is_held(uuid, false);
    lease_name(name, uuid, false);
    int fd = counts ? -1 : open_lease(name);
    if (fd >= 0) {
      const char *record = read_text(fd, scratch);
      const char *ended = first(find_key(record, "claim")); /* of the line that takes the place of a record */
      long pid = (long)number(ended ? ended : find_key(record, "pid"), 0);
      counts = pid > 0 && is_here(record) && someone_on(uuid, pid) && is_leaving(pid);
      close(fd);
    }
    if (counts && !strncmp(uuid, "MIG-", 4)) instances++; else possible += counts;
  }
  if (instances && !possible) possible = 1;
  return possible < ticket->nb_gpus;
}

static bool was_ahead(const struct ticket *ticket) /* or came later, with a number from before a cleaning */
{
  if (my_ticket_fd < 0) return true;
  for (int i = 0; i < ahead_count; i++)
    if (ahead[i].number == ticket->number)
      return ahead[i].since == ticket->since && ahead[i].pid == ticket->pid && ahead[i].pidns == ticket->pidns;
  return false;
}

/* The nearest ticket to wait for, open, or -1. Under host.lock. */
static int look_ahead(int *others, bool remember)
{
  static struct ticket ticket;
  struct place *numbers;
  int count = list_tickets(&numbers), nearest = -1;
  *others = 0;
  if (remember) ahead_count = 0;
  for (int i = count - 1; i >= 0; i--) {
    if (!numbers[i].counts || (my_ticket_fd >= 0 && numbers[i].number >= my_number)) continue;
    int fd = open_live(numbers[i].number, &ticket);
    if (fd < 0) continue;
    ++*others;
    if (remember && ahead_count < TICKETS) {
      ahead[ahead_count].number = ticket.number, ahead[ahead_count].since = ticket.since;
      ahead[ahead_count].pid = ticket.pid, ahead[ahead_count++].pidns = ticket.pidns;
    }
    if (nearest < 0 && was_ahead(&ticket) && competes(&ticket) && !is_absent(&ticket)) nearest = fd;
    else close(fd);
    if (nearest >= 0 && !remember) break;
  }
  free(numbers);
#ifdef NO_QUEUE
  if (nearest >= 0) close(nearest), nearest = -1;
#endif
  return nearest;
}

static void take_ticket(void) /* under host.lock */
{
  struct place *numbers;
  struct stat s;
  char *text = NULL;
  size_t size;
  int count = list_tickets(&numbers);
  my_number = count ? numbers[count - 1].number + 1 : 1;
  free(numbers);
  put(my_ticket_name, sizeof my_ticket_name, "%ld.ticket", my_number);
  if (!make_file(queue_dir, my_ticket_name, 0644)) die(70, "%s cannot be made: %s", my_ticket_name, strerror(errno));
  my_ticket_fd = openat(queue_dir, my_ticket_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (my_ticket_fd < 0 || fstat(my_ticket_fd, &s) || s.st_uid != geteuid() || s.st_size || flock(my_ticket_fd, LOCK_EX | LOCK_NB)) die(70, "%s cannot be locked", my_ticket_name);
  FILE *out = open_memstream(&text, &size);
  if (!out) die(70, "no memory");
  fprintf(out, "{\"pid\":%ld,\"pidns\":%ld,\"user\":", (long)getpid(), own_pidns());
  write_string(out, user);
  fprintf(out, ",\"request\":{\"nb_gpus\":%d,", wanted);
  write_gpus(out, true, inner_claim ? ".inner" : "");
  fprintf(out, ",\"min_memory\":null},\"since\":%.6f,\"hold_for\":", seconds(CLOCK_REALTIME));
  if (hold_for >= 0) fprintf(out, "%.3f}\n", hold_for); else fputs("null}\n", out);
  if (fclose(out) || !write_text(my_ticket_fd, text)) {
    unlinkat(queue_dir, my_ticket_name, 0);
    die(70, "%s cannot be written: %s", my_ticket_name, strerror(errno));
  }
  free(text);
}

static void abandon_ticket(void) /* under host.lock */
{
  if (my_ticket_fd < 0) return;
  if (stands_there(my_ticket_fd, queue_dir, my_ticket_name)) unlinkat(queue_dir, my_ticket_name, 0);
  give_back(&my_ticket_fd);
}

static void leave_queue(void)
{
  if (my_ticket_fd < 0) return;
  lock_host();
  abandon_ticket();
  unlock_host();
}

/* ---- waiting ---- */

static void on_alarm(int signal) { (void)signal; }

static void alarm_after(double s) /* and again, in case it fell between two calls */
{
  struct itimerval timer = {{0, 20000}, {(time_t)s, (suseconds_t)((s - (double)(time_t)s) * 1e6)}};
  if (s <= 0) timer.it_interval = timer.it_value = (struct timeval){0, 0};
  setitimer(ITIMER_REAL, &timer, NULL);
}

static double no_longer_than(double s)
{
  double left = deadline < 0 ? s : deadline - now();
  return left < s ? (left > 0.001 ? left : 0.001) : s;
}

static void sleep_on(int *fd, double longest) /* until that waiter has gone */
{
  double until = now() + no_longer_than(longest);
  alarm_after(no_longer_than(longest));
  while (flock(*fd, LOCK_SH) && errno == EINTR && now() < until) {}
  alarm_after(0);
  give_back(fd);
}

static bool is_never_ours(const struct gpu *gpu) /* closed, or held by this process or an ancestor */
{
  char name[160];
  struct stat_line line;
  bool own = gpu->closed;
  lease_name(name, gpu->uuid, inner_claim);
  int fd = gpu->held ? open_lease(name) : -1;
  if (fd < 0) return own;
  const char *record = read_text(fd, scratch);
  long pid = (long)number(find_key(record, "pid"), 0), shown = holder(fd);
  double start = number(find_key(record, "start"), -1);
  if (pid > 0 && is_here(record) && shown == pid)
    for (long p = getpid(); p > 0 && !own; p = stat_of(p, &line) ? line.parent : 0) own = p == pid && !has_ended(pid, start);
  close(fd);
  return own;
}

static void refuse_to_wait_for_ever(void)
{
  int others = 0;
  for (int i = 0; i < gpu_count; i++)
    others += (!inner_claim || gpus[i].inside) && !is_never_ours(&gpus[i]);
  if (others >= wanted) return;
  leave_queue();
  die(75, "too few of these GPUs can ever be had: this process's own parents hold some, or their leases cannot be opened");
}

/* ---- the older package ---- */

static int lock_older_package(void) /* shared; -1: it is not there */
{
  struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
  const char *mode = getenv("SAFE_GPU_LEGACY_LOCK");
  if (mode && !strcmp(mode, "never")) return -1;
  int dir = open("/tmp/safe_gpu", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (dir < 0) return -1;
  struct stat s;
  const char *name = "gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users";
  int fd = -1, failed = 1;
  if (!fstatat(dir, name, &s, AT_SYMLINK_NOFOLLOW) && S_ISREG(s.st_mode))
    fd = openat(dir, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  close(dir);
  if (fd < 0) return -1;
  alarm_after(no_longer_than(1e6));
  while ((failed = fcntl(fd, F_OFD_SETLKW, &lock)) && errno == EINTR && (deadline < 0 || now() < deadline)) {}
  alarm_after(0);
  if (!failed) return fd;
  for (int i = 0; i < gpu_count; i++) release(&gpus[i]);
  leave_queue();
  die(75, "the older package does not let go of its lock");
}

/* ---- a claim ---- */

/* A claim inside another one is on its GPUs alone, for as long as that lives. Under host.lock, at every look. */
static void enter_scope(void)
{
  int found = 0;
  for (int i = 0; i < gpu_count; i++) {
    gpus[i].inside = gpus[i].inside && (gpus[i].by_name || is_held(gpus[i].uuid, false));
    found += gpus[i].inside;
  }
  inner_claim = found > 0;
  if (inner_claim && found >= wanted) return judge_gpus();
  if (inner_claim) die(75, "the claim around this one holds %d of these GPUs", found);
  fputs("client: warning: SAFE_GPU_SCOPE is of no living claim of these GPUs, and is ignored\n", stderr);
  *scope_hash = 0;
  abandon_ticket();
  judge_gpus();
}

static void claim(void)
{
  double shortage = now();
  bool looked_again = false;
  for (;;) {
    int others;
    if (now() - polled > 0.5) poll_driver();
    if (*scope_hash) look_for_scope();
    lock_host();
    if (*scope_hash) enter_scope();
    int nearest = look_ahead(&others, my_ticket_fd < 0);
    bool taken = nearest < 0 && take(), named = false, stale = false;
    if (!taken && my_ticket_fd < 0 && (deadline < 0 || deadline > now())) take_ticket();
    unlock_host();
    if (taken && is_still_inside()) return;
    if (taken) {
      for (int i = 0; i < gpu_count; i++) release(&gpus[i]);
      if (nearest >= 0) close(nearest);
      continue;
    }
    for (int i = 0; i < gpu_count; i++) {
      named |= gpus[i].named_until > now();
      stale |= gpus[i].busy;
    }
    if (nearest < 0) refuse_to_wait_for_ever();
    if (deadline >= 0 && now() >= deadline) {
      if (named && !looked_again) { /* a child between fork and exec may have a copy of a name that was freed */
        for (int i = 0; i < gpu_count; i++) gpus[i].named_until = 0;
        looked_again = true;
        nap(0.005);
        if (nearest >= 0) close(nearest);
        continue;
      }
      leave_queue();
      die(75, "%d of these GPUs were not free in time", wanted);
    }
    if (nearest >= 0) sleep_on(&nearest, others < 32 ? 10 : 60), polled = -1e9;
    else nap(no_longer_than(0.015));
    if (stale && now() - shortage > 0.1) {
      shortage = now();
      poll_driver();
    }
  }
}

static void claim_and_check(void)
{
  for (;;) {
    bool good = true;
    claim();
    int older = lock_older_package();
#ifndef NO_LEASE
    poll_driver();
    for (int i = 0; i < gpu_count; i++) good &= gpus[i].lease < 0 || !gpus[i].busy;
#endif
    if (good) {
      leave_queue();
      if (older >= 0) close(older);
      return;
    }
    for (int i = 0; i < gpu_count; i++) release(&gpus[i]);
    if (older >= 0) close(older);
  }
}

static void keep(int fd) /* across exec, where a shell's redirections do not reach */
{
  if (fd >= 0 && fcntl(fd, F_DUPFD, 500) < 0) fcntl(fd, F_SETFD, 0);
}

static _Noreturn void become(char **argv)
{
  char list[GPUS * UUID_SIZE] = "";
  for (int i = 0; i < gpu_count; i++) {
    if (gpus[i].lease < 0) continue;
    if (*list) strcat(list, ",");
    strcat(list, gpus[i].uuid);
    keep(gpus[i].lease);
    for (int j = 0; j < NAMES; j++) keep(gpus[i].names[j]);
  }
  keep(kept_dir);
  setenv("CUDA_VISIBLE_DEVICES", list, 1);
  if (*token) setenv("SAFE_GPU_SCOPE", token, 1);
  else if (!inner_claim) unsetenv("SAFE_GPU_SCOPE");
  signal(SIGALRM, SIG_DFL);
  execvp(argv[0], argv);
  die(70, "%s: %s", argv[0], strerror(errno));
}

static void prepare(const char *program)
{
  struct passwd *entry = getpwuid(geteuid());
  const char *slash = strrchr(program, '/');
  char hash[17];
  unsigned char random[8];
  put(user, sizeof user, "%ld", (long)geteuid());
  if (entry) put(user, sizeof user, "%s", entry->pw_name);
  put(command, sizeof command, "%.200s", slash ? slash + 1 : program);
  state_dir = open_state_dir();
  leases_dir = open_directory(state_dir, "leases");
  queue_dir = open_directory(state_dir, "queue");
  kept_dir = openat(state_dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* the command holds it, too */
  if (kept_dir >= 0) (void)!flock(kept_dir, LOCK_SH | LOCK_NB);
  if (preset) {
    hash16(simulated, hash);
    put(name_prefix, sizeof name_prefix, "sim-%s/", hash);
  }
  scope = getenv("SAFE_GPU_SCOPE");
  if (scope && *scope) {
    const char *place = strchr(scope, '@');
    named_here = !place || !place[1] || strtoul(place + 1, NULL, 10) == namespace_of_names();
    hash16(scope, scope_hash);
  }
  if (*token) {
    if (getrandom(random, sizeof random, 0) != sizeof random) die(70, "no random numbers");
    for (int i = 0; i < 8; i++) sprintf(secret + 2 * i, "%02x", random[i]);
    new_token(namespace_of_names());
  }
  struct sigaction action = {.sa_handler = on_alarm}; /* without SA_RESTART: a sleep in flock ends */
  sigaction(SIGALRM, &action, NULL);
}

int main(int argc, char **argv)
{
  int option;
  char *list = NULL;
  while ((option = getopt(argc, argv, "+n:g:p:t:f:s")) != -1) switch (option) {
    case 'n': wanted = atoi(optarg); break;
    case 'g': list = optarg; break;
    case 'p': preset = optarg; break;
    case 't': deadline = now() + atof(optarg); break;
    case 'f': hold_for = atof(optarg); break;
    case 's': strcpy(token, "wanted"); break;
    default: die(64, "unknown option");
    }
  for (char *uuid = list ? strtok(list, ",") : NULL; uuid && gpu_count < GPUS; uuid = strtok(NULL, ",")) {
    struct gpu *gpu = &gpus[gpu_count++];
    if (strlen(uuid) >= UUID_SIZE) die(64, "%s is no UUID", uuid);
    strcpy(gpu->uuid, uuid);
    gpu->lease = gpu->names[0] = gpu->names[1] = gpu->names[2] = -1;
  }
  if (!argv[optind] || wanted < 1 || wanted > gpu_count || (hold_for >= 0 && hold_for < 1))
    die(64, "usage: client -n N -g UUID,UUID,... [-p PRESET] [-t SECONDS] [-f SECONDS] [-s] COMMAND [ARGUMENT ...]");
  prepare(argv[optind]);
  claim_and_check();
  become(argv + optind);
}
