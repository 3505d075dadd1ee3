/* An example of a client of safe_gpu/coordination/PROTOCOL.md, to be read beside that page: its parts have the names of
 * the page's sections and stand in their order. Only the steps of a claim, which use all the rest, stand last.
 *
 *   cc -std=c11 -o client client.c
 *   client -n N -g UUID,UUID,... [-m BYTES] [-s BYTES] [-f SECONDS] [-t SECONDS] COMMAND [ARGUMENT ...]
 *
 * It claims N of these GPUs, the first by UUID, waits for them in the queue (for ever, or -t seconds), and becomes
 * COMMAND, which then holds the claim. -m: the capacity of each GPU. -s: a share of each, else all of it. -f: for how
 * many seconds they will be held. Exit: 75 no GPUs, 70 anything else that failed, 64 usage. It knows no driver: fill in
 * poll_driver().
 *
 * What it leaves out, and why that is safe:
 * - It does not parse JSON. An entry takes all of each GPU whose UUID it has in quotes, or a share if "gpus" has a
 *   number there. A quote within a text has a backslash before it, so no text looks like a key or a UUID.
 * - All entries count, also beyond the bounds on files, bytes and values, and each name of a file by itself. So this
 *   client takes less than it could. It reads all of them each time, and is slow where a neighbour makes very many.
 * - Claims inside claims count as all others: they have GPUs that the enclosing claim takes anyway. So a client that is
 *   started in a claim gets none of its GPUs.
 * - It passes nobody in the queue and has no turn of its own: it only waits longer.
 * - Shares of processes that are not seen here, as in a container or under hidepid, take all of the GPU.
 * - Reserved GPUs are closed to all, also to those for whom they are reserved.
 * - The package makes the directories and host.lock: until its first claim this client refuses, and while they are
 *   gone it waits. It refuses where there are no sockets, or no locks of open file descriptions.
 * - The package removes the files of the dead, and notes their end in the history. When its user has as many files as
 *   count, this client refuses.
 * - Texts for people, faults, limits of users.
 * Use another client for MIG instances, other pieces and GPUs with two names (this one accepts the UUIDs of NVIDIA's
 * GPUs alone), and beside safe-gpu 1.x and 2.0, whose lock it does not take. */
#define _GNU_SOURCE
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
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

enum { FILES_OF_USER = 2048, BYTES_OF_USER = 4 << 20, ENTRY_BYTES = 32 << 10 }; /* What is at most, and the next line */
enum { LARGEST_GAP = 10000000, TURN_PER_NUMBER = 1024, PARTS = 32, CLOSED_BYTES = 64 << 10 };
enum { MOST_GPUS = 64, UUID_SIZE = 41, NAME_SIZE = 40, LIST_SIZE = 8192 };

typedef unsigned long long bits; /* one for each part of a GPU */

static struct gpu {
  char uuid[UUID_SIZE];
  bool is_busy, is_closed, is_elsewhere; /* elsewhere: a door is held by who has no entry here */
  long long taken;                       /* bytes, by the claims of others */
  bits parts, excused; /* of others whose processes live: now, and when this process took its door */
  int door, part;      /* of this process, else -1 */
} gpus[MOST_GPUS];

static struct directory {
  const char *name;
  int fd, own;              /* own: the entry of this process, else -1 */
  char own_name[NAME_SIZE]; /* else "" */
  long long highest;        /* of the numbers that count */
  long long files, bytes;   /* of this user */
} claims = {.name = "claims", .fd = -1, .own = -1}, queue = {.name = "queue", .fd = -1, .own = -1};

static const char *state_path = "/tmp/safe-gpu";
static int gpu_count, wanted = 1, state_fd = -1, host_lock = -1;
static long long capacity = 80LL << 30, share; /* share 0: all of each GPU */
static double hold_for = -1, deadline = 1e18;
/* What entries say: the GPUs of a ticket, those of a claim, and its parts of them. What COMMAND sees. */
static char listed[LIST_SIZE], claimed[LIST_SIZE], numbers[LIST_SIZE], visible[LIST_SIZE];

static double seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double now(void) { return seconds(CLOCK_MONOTONIC); }

static unsigned long long random_number(void) {
  unsigned long long number;
  if (getrandom(&number, sizeof number, 0) != sizeof number) err(70, "getrandom");
  return number;
}

static void nap(unsigned least, unsigned most) { /* microseconds; a random time, so that two do not keep step */
  usleep(least + (unsigned)(random_number() % (most - least)));
}

static void add(char *list, const char *format, ...) { /* behind a comma */
  va_list arguments;
  size_t length = strlen(list);
  if (length) list[length++] = ',';
  va_start(arguments, format);
  vsnprintf(list + length, LIST_SIZE - length, format, arguments);
  va_end(arguments);
}

/* ---- Files ---- */

static bool is_same_file(int fd, int directory, const char *name) {
  struct stat a, b;
  if (fstat(fd, &a) || fstatat(directory, name, &b, AT_SYMLINK_NOFOLLOW)) return false;
  return a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static bool reopen(int *fd, int directory, const char *name, int flags) { /* false: it is not there */
  if (*fd >= 0) close(*fd);
  *fd = openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC);
  if (*fd >= 0) return true;
  if (errno != ENOENT) err(70, "%s", name);
  nap(1000, 50000);
  return false;
}

static bool open_directories(void) { /* false: somebody makes or removes them */
  if (!reopen(&state_fd, AT_FDCWD, state_path, O_DIRECTORY)) return false;
  flock(state_fd, LOCK_SH | LOCK_NB); /* if it can be had at once: systemd-tmpfiles skips the directory */
  return reopen(&claims.fd, state_fd, "claims", O_DIRECTORY) && reopen(&queue.fd, state_fd, "queue", O_DIRECTORY);
}

static bool lock_host(void) { /* false: somebody removes it */
  double began = now();
  if (!reopen(&host_lock, state_fd, "host.lock", O_RDWR)) return false;
  while (flock(host_lock, LOCK_EX | LOCK_NB)) {
    if (now() > began + 10 && now() >= deadline) errx(70, "another process holds host.lock");
    nap(1000, now() < began + 0.1 ? 5000 : 100000);
  }
  return is_same_file(host_lock, state_fd, "host.lock");
}

/* ---- Entries ---- */

static const char *value_of(const char *text, const char *key) { /* what stands behind "key": or NULL */
  char quoted[UUID_SIZE + 2];
  int length = snprintf(quoted, sizeof quoted, "\"%s\"", key);
  for (const char *p = text; (p = strstr(p, quoted));) {
    p += length;
    p += strspn(p, " ");
    if (*p == ':') return p + 1 + strspn(p + 1, " ");
  }
  return NULL;
}

static long long number(const char *text, const char *key) { /* -1: it is not whole, or has more than 18 digits */
  const char *value = value_of(text, key);
  size_t digits = value ? strspn(value, "0123456789") : 0;
  return digits && digits <= 18 && strchr(", }", value[digits]) ? atoll(value) : -1;
}

static long long number_in(const char *text, const char *object, const char *uuid) { /* -1: it has none there */
  const char *begin = value_of(text, object);
  bool is_only_one = begin && *begin == '{' && !value_of(begin, object);
  const char *end = is_only_one ? strchr(begin, '}') : NULL;
  const char *value = end ? value_of(begin, uuid) : NULL;
  return value && value < end ? number(begin, uuid) : -1;
}

static bool has_letters_as_numbers(const char *text) { /* so that it may have any key, and any UUID */
  for (const char *p = text; (p = strstr(p, "\\u00")); p++)
    if (p[4] < '8') return true;
  return false;
}

static bool is_named(const char *text, const char *uuid) {
  char quoted[UUID_SIZE + 2];
  snprintf(quoted, sizeof quoted, "\"%s\"", uuid);
  return strstr(text, quoted) || has_letters_as_numbers(text);
}

static long long pid_namespace(void) {
  struct stat s;
  return stat("/proc/self/ns/pid", &s) ? 0 : (long long)s.st_ino;
}

static long long start_of(long long pid) { /* in clock ticks since boot; 0: the process has ended, or is not seen */
  static const char format[] = "%*d (%*[^)]) %c %*s %*s %*s %*s %*s %*s %*s %*s %*s"
                               "%*s %*s %*s %*s %*s %*s %*s %*s %*s %lld";
  char path[64], state;
  long long start;
  snprintf(path, sizeof path, "/proc/%lld/stat", pid);
  FILE *file = fopen(path, "re");
  bool is_read = file && fscanf(file, format, &state, &start) == 2;
  if (file) fclose(file);
  return is_read && state != 'Z' && state != 'X' ? start : 0;
}

static bool process_lives(const char *text) { /* of an entry: a child that outlives it keeps the entry and no door */
  bool is_of_here = number(text, "pidns") == pid_namespace();
  return is_of_here && number(text, "start") > 0 && start_of(number(text, "pid")) == number(text, "start");
}

static int write_entry(char *text, bool is_ticket) { /* the bytes that it has */
  double since = seconds(CLOCK_REALTIME);
  int size = sprintf(text, "{\"v\":1,\"since\":%.3f,\"pid\":%d", since, getpid());
  size += sprintf(text + size, ",\"start\":%lld,\"pidns\":%lld", start_of(getpid()), pid_namespace());
  if (is_ticket && hold_for >= 0) size += sprintf(text + size, ",\"hold_for\":%.3f", hold_for);
  if (is_ticket && share) size += sprintf(text + size, ",\"share\":%lld", share);
  if (is_ticket) return size + sprintf(text + size, ",\"nb_gpus\":%d,\"gpus\":[%s]}\n", wanted, listed);
  if (hold_for >= 0) size += sprintf(text + size, ",\"until\":%.3f", since + hold_for);
  return size + sprintf(text + size, ",\"gpus\":{%s},\"parts\":{%s}}\n", claimed, numbers);
}

static void remove_entry(struct directory *d) {
  if (d->own < 0) return;
  unlinkat(d->fd, d->own_name, 0);
  close(d->own); /* which gives the lock back: no child has a copy */
  d->own = -1;
  *d->own_name = 0;
}

static bool make_entry(struct directory *d) { /* false: somebody has removed it */
  char hidden[32], text[ENTRY_BYTES];
  int size = write_entry(text, d == &queue);
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET}; /* of the whole file */
  if (geteuid() && (d->files >= FILES_OF_USER || d->bytes + size > BYTES_OF_USER))
    errx(70, "%s has as many files of yours as count: call safe-gpu status, which removes those of the dead", d->name);
  snprintf(hidden, sizeof hidden, ".%016llx", random_number());
  snprintf(d->own_name, NAME_SIZE, "%lld.%016llx", d->highest + 1, random_number());
  d->own = openat(d->fd, hidden, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600); /* 1 */
  if (d->own < 0 && errno == ENOENT) return false;
  if (d->own < 0 || write(d->own, text, (size_t)size) != size) err(70, "%s", d->name); /* 2 */
  if (fcntl(d->own, F_OFD_SETLK, &lock)) err(70, "F_OFD_SETLK");                       /* 3 */
  if (fchmod(d->own, 0644)) err(70, "%s", d->name);                                    /* 4 */
  renameat(d->fd, hidden, d->fd, d->own_name);                                         /* 5 */
  if (is_same_file(d->own, d->fd, d->own_name)) return true;                           /* 6 */
  remove_entry(d);
  return false;
}

static bool read_living(const struct directory *d, const char *name, char *text) { /* false: it is dead, or ignored */
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  int fd = openat(d->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  bool is_by_owner = errno == ELOOP || errno == EACCES || errno == EPERM || errno == ENXIO || errno == EWOULDBLOCK;
  if (fd < 0 && errno != ENOENT && !is_by_owner) err(70, "%s", name); /* were it left out, two could have one GPU */
  if (fd < 0) return false;
  if (fcntl(fd, F_OFD_GETLK, &lock)) err(70, "F_OFD_GETLK");
  ssize_t size = pread(fd, text, ENTRY_BYTES, 0);
  close(fd);
  text[size < 0 ? 0 : size] = 0;
  return lock.l_type == F_WRLCK && !lock.l_start && !lock.l_len;
}

static int has_name_of_entry(const struct dirent *one) { /* N.RANDOM */
  size_t digits = strspn(one->d_name, "0123456789");
  const char *behind = one->d_name + digits;
  bool is_number = digits == 1 || (digits > 1 && digits <= 18 && *one->d_name != '0');
  return is_number && *behind == '.' && strspn(behind + 1, "0123456789abcdef") == 16 && !behind[17];
}

static void list(struct directory *d, void (*use)(const char *name, const char *text)) { /* living entries of others */
  char text[ENTRY_BYTES + 1];
  struct stat s;
  struct dirent **names;
  int count = scandirat(d->fd, ".", &names, has_name_of_entry, versionsort); /* by number; in a descriptor of its own */
  if (count < 0) err(70, "%s", d->name);
  d->highest = d->files = d->bytes = 0;
  for (int i = 0; i < count; free(names[i++])) {
    const char *name = names[i]->d_name;
    if (atoll(name) <= d->highest + LARGEST_GAP) d->highest = atoll(name);
    bool is_gone = fstatat(d->fd, name, &s, AT_SYMLINK_NOFOLLOW);
    if (is_gone && errno != ENOENT) err(70, "%s", name);
    if (is_gone || !S_ISREG(s.st_mode) || s.st_mode & 022 || s.st_size > ENTRY_BYTES) continue;
    if (s.st_uid == geteuid()) d->files++;
    if (s.st_uid == geteuid()) d->bytes += s.st_size;
    if (strcmp(name, d->own_name) && read_living(d, name, text)) use(name, text);
  }
  free(names);
}

/* ---- Doors ---- */

static int door(const char *uuid, int part, bool binds) { /* a socket that is bound or connected; part -1: of the GPU */
  char tail[16] = "";
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (part >= 0) snprintf(tail, sizeof tail, ".%d", part);
  int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "safe-gpu/1/%s%s", uuid, tail);
  socklen_t size = (socklen_t)(sizeof address.sun_family + 1 + (size_t)length); /* above 48: nothing is padded */
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) err(70, "socket");
  if (!(binds ? bind : connect)(fd, (struct sockaddr *)&address, size)) return fd;
  int error = errno;
  close(fd);
  errno = error;
  return -1;
}

static int take_door(const char *uuid, int part) { /* -1: another process holds it */
  int fd = door(uuid, part, true);
  if (fd < 0 && errno != EADDRINUSE) err(70, "bind");
  if (fd >= 0) shutdown(fd, SHUT_RDWR);
  return fd;
}

static bits held_parts(const char *uuid) { /* of shares, and in the upper half of pieces */
  bits held = 0;
  for (int part = 0; part < 2 * PARTS; part++) {
    int fd = door(uuid, part, false);
    if (fd >= 0 || errno != ECONNREFUSED) held |= 1ULL << part;
    if (fd >= 0) close(fd);
  }
  return held;
}

static void list_claims(void); /* A claim: what is in the way */

static bool take_doors(struct gpu *gpu) { /* false: another directory has the GPU, or some of it */
  int whole = take_door(gpu->uuid, -1);
  if (whole < 0) return false;
  bits held = held_parts(gpu->uuid);
  gpu->excused = gpu->parts;
  if (!share) gpu->door = whole;
  if (!share) return !held;
  for (int part = 0; part < PARTS && gpu->door < 0; part++) {
    if ((held | gpu->parts) & 1ULL << part) continue;
    gpu->door = take_door(gpu->uuid, part);
    gpu->part = part;
  }
  list_claims(); /* whether the processes that have these parts still live; no other directory gets one meanwhile */
  close(whole);
  return gpu->door >= 0 && !(held & ~gpu->parts);
}

static void close_door(struct gpu *gpu) {
  if (gpu->door >= 0) close(gpu->door);
  gpu->door = gpu->part = -1;
  gpu->excused = 0;
}

/* ---- A claim: what is in the way ---- */

static void use_claim(const char *name, const char *text) {
  const char *pieces = value_of(text, "pieces");
  bool has_pieces = pieces && strncmp(pieces, "{}", 2); /* who has a piece of a GPU keeps all of it from others */
  bool may_be_share = !has_pieces && !has_letters_as_numbers(text);
  bool is_held = share && process_lives(text);          /* its part, by a process and not only by an entry */
  (void)name;
  for (struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    if (!is_named(text, gpu->uuid)) continue;
    long long bytes = number_in(text, "gpus", gpu->uuid), part = number_in(text, "parts", gpu->uuid);
    bool leaves_some = may_be_share && bytes > 0 && bytes < capacity - gpu->taken;
    gpu->taken = leaves_some ? gpu->taken + bytes : capacity;
    if (is_held && part >= 0 && part < PARTS) gpu->parts |= 1ULL << part;
  }
}

static void list_claims(void) {
  for (int i = 0; i < gpu_count; i++) gpus[i].taken = 0;
  for (int i = 0; i < gpu_count; i++) gpus[i].parts = 0;
  list(&claims, use_claim);
}

static bool has_room(const struct gpu *gpu) { return capacity - gpu->taken >= (share ? share : capacity); }

/* ---- Waiting ---- */

static char ahead[NAME_SIZE]; /* a ticket that competes and is ahead */
static int ahead_count;
static double own_turn; /* of a ticket without one: the highest of those with lower numbers */

static void use_ticket(const char *name, const char *text) {
  const char *inside = value_of(text, "inside"), *said = value_of(text, "turn");
  long long number = atoll(name), own_number = queue.own < 0 ? 1LL << 62 : atoll(queue.own_name);
  double turn = said && strchr("0123456789", *said) ? atof(said) : -1;
  bool competes = false;
  if (inside && inside[0] == '"' && inside[1] != '"') return; /* it waits for GPUs of the claim that encloses it */
  if (turn > (double)number * TURN_PER_NUMBER) turn = -1;
  if (number < own_number && turn > own_turn) own_turn = turn;
  for (int i = 0; i < gpu_count; i++) competes = competes || is_named(text, gpus[i].uuid);
  if (!competes || (number >= own_number && (turn < 0 || turn >= own_turn))) return;
  strcpy(ahead, name);
  ahead_count++;
}

static void list_queue(void) { /* a ticket that was removed is none, nor is one whose number is disregarded */
  if (queue.own >= 0 && !is_same_file(queue.own, queue.fd, queue.own_name)) remove_entry(&queue);
  ahead_count = 0;
  own_turn = 0;
  list(&queue, use_ticket);
  if (queue.own < 0 || atoll(queue.own_name) <= queue.highest) return;
  remove_entry(&queue);
  list_queue();
}

/* ---- Busy GPUs ---- */

static void poll_driver(void) {} /* fill in: set is_busy of each GPU by what the driver shows, as the page says */

/* ---- Closed GPUs ---- */

static void read_closed_file(int directory, const char *path) { /* if it is of root, or of who has the directory */
  char line[1001], uuid[UUID_SIZE], from[32], until[32];
  double begin = seconds(CLOCK_REALTIME), end = begin + (hold_for < 0 ? 86400 : hold_for);
  struct stat s, above = {0};
  int fd = openat(directory, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
  if (!file) return;
  if (fstat(fd, &s) || (directory >= 0 && fstat(directory, &above))) err(70, "%s", path);
  bool counts = S_ISREG(s.st_mode) && !(s.st_mode & 022) && s.st_size <= CLOSED_BYTES;
  bool is_trusted = counts && (!s.st_uid || s.st_uid == above.st_uid);
  while (is_trusted && fgets(line, sizeof line, file)) {
    if (sscanf(line, "%40s %31s %31s", uuid, from, until) != 3) continue;
    bool is_closed = !strcmp(from, "-") || (begin < atof(until) && atof(from) < end); /* drained, or reserved */
    for (int i = 0; i < gpu_count; i++)
      if (is_closed && !strcmp(gpus[i].uuid, uuid)) gpus[i].is_closed = true;
  }
  fclose(file);
}

static void read_closed(void) {
  for (int i = 0; i < gpu_count; i++) gpus[i].is_closed = false;
  read_closed_file(AT_FDCWD, "/etc/safe-gpu/closed");
  read_closed_file(state_fd, "closed");
}

/* ---- A claim: its steps ---- */

static bool could_do(const struct gpu *gpu) {
  return !gpu->is_busy && !gpu->is_closed && !gpu->is_elsewhere && has_room(gpu);
}

static int count_free(void) {
  int count = 0;
  for (int i = 0; i < gpu_count; i++) count += could_do(&gpus[i]);
  return count;
}

static void release(void) { /* 6: a door that is free must not be that of an entry here */
  remove_entry(&claims);
  for (int i = 0; i < gpu_count; i++) close_door(&gpus[i]);
}

static bool choose(void) { /* 2 and 3: takes the doors of enough GPUs, in the order of their UUIDs, or of none */
  int count = 0;
  *claimed = *numbers = *visible = 0;
  if (count_free() < wanted) return false;
  for (struct gpu *gpu = gpus; gpu < gpus + gpu_count && count < wanted; gpu++) {
    if (!could_do(gpu)) continue;
    gpu->is_elsewhere = !take_doors(gpu);
    if (gpu->is_elsewhere) close_door(gpu);
    if (gpu->is_elsewhere) continue;
    count++;
    add(visible, "%s", gpu->uuid);
    if (share) add(claimed, "\"%s\":%lld", gpu->uuid, share);
    if (share) add(numbers, "\"%s\":%d", gpu->uuid, gpu->part);
    if (!share) add(claimed, "\"%s\":null", gpu->uuid);
  }
  if (count < wanted) release();
  return count == wanted;
}

static bool may_stay(void) { /* 4 and 5, when host.lock has been given back */
  list_claims();
  read_closed();
  poll_driver();
  for (const struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    bits lost = gpu->excused & ~gpu->parts; /* if one is held again, another directory may have it */
    if (lost && lost & held_parts(gpu->uuid)) return false;
    if (gpu->door >= 0 && !could_do(gpu)) return false;
  }
  return is_same_file(state_fd, AT_FDCWD, state_path) && is_same_file(claims.fd, state_fd, "claims");
}

enum outcome { CLAIMED, WITHDREW, NOT_FREE };

static enum outcome attempt(void) {
  poll_driver(); /* 1 */
  if (!open_directories()) return WITHDREW;
  read_closed();
  if (!lock_host()) return WITHDREW; /* 2 */
  list_claims();
  list_queue();
  for (int i = 0; i < gpu_count; i++) gpus[i].is_elsewhere = false;
  bool has_doors = !ahead_count && choose();       /* 3 */
  bool is_made = has_doors && make_entry(&claims); /* 4 */
  if (!has_doors && queue.own < 0 && now() < deadline) make_entry(&queue);
  close(host_lock);
  host_lock = -1;
  if (!is_made || !may_stay()) {
    release();
    return has_doors ? WITHDREW : NOT_FREE;
  }
  remove_entry(&queue); /* after the second poll, so that it need not come back */
  return CLAIMED;
}

static void wait_for_change(void) { /* of the ticket ahead, or as the head of the queue, of claims */
  char text[ENTRY_BYTES + 1];
  double until = now() + (ahead_count > 32 ? 60 : ahead_count ? 10 : 1);
  for (bool has_changed = false; !has_changed && now() < until && now() < deadline;) {
    nap(10000, 100000);
    if (!ahead_count) list_claims();
    has_changed = ahead_count ? !read_living(&queue, ahead, text) : count_free() >= wanted;
  }
}

static void claim(void) {
  for (bool is_last_look = false;;) {
    enum outcome outcome = attempt();
    if (outcome == CLAIMED) return;
    if (outcome == WITHDREW && now() < deadline + 1) {
      nap(500, 10000);
    } else if (now() < deadline) {
      wait_for_change();
    } else if (!is_last_look) {
      is_last_look = true;
      nap(5000, 6000); /* a dying process closes its doors one by one */
    } else {
      remove_entry(&queue);
      errx(75, "%d of these GPUs were not free in time", wanted);
    }
  }
}

static void keep(int fd) { /* for COMMAND, where the redirections of a shell do not reach */
  if (fcntl(fd, F_DUPFD, 500) < 0) err(70, "no descriptors");
}

static _Noreturn void become(char **command) {
  char bytes[32];
  snprintf(bytes, sizeof bytes, "%lld", share);
  setenv("CUDA_VISIBLE_DEVICES", visible, 1);
  if (share) setenv("SAFE_GPU_SHARE", bytes, 1);
  keep(state_fd);
  keep(claims.own);
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].door >= 0) keep(gpus[i].door);
  execvp(*command, command);
  err(70, "%s", *command);
}

/* ---- The command line ---- */

static int by_uuid(const void *a, const void *b) { return strcmp(a, b); } /* which stands first in a struct gpu */

static void add_gpu(const char *uuid) {
  bool is_of_nvidia = strlen(uuid) == UUID_SIZE - 1 && strspn(uuid, "GPU-0123456789abcdef") == UUID_SIZE - 1;
  if (!is_of_nvidia || gpu_count == MOST_GPUS) errx(64, "%s: not the UUID of an NVIDIA GPU, or too many", uuid);
  strcpy(gpus[gpu_count].uuid, uuid);
  gpus[gpu_count].door = gpus[gpu_count].part = -1;
  gpu_count++;
  add(listed, "\"%s\"", uuid);
}

static void find_state_directory(void) {
  char path[PATH_MAX];
  const char *given = getenv("SAFE_GPU_DIR");
  if (given && *given) state_path = given;
  else if (!access("/etc/safe-gpu/config.ini", F_OK)) errx(64, "set SAFE_GPU_DIR, as in /etc/safe-gpu/config.ini");
  if (*state_path != '/') errx(64, "SAFE_GPU_DIR=%s is no absolute path", state_path);
  snprintf(path, sizeof path, "%s/host.lock", state_path);
  if (access(path, F_OK)) err(70, "%s (the first claim of the package makes it)", path);
}

int main(int argc, char **argv) {
  int option;
  char *names = NULL;
  while ((option = getopt(argc, argv, "+n:g:m:s:f:t:")) != -1) switch (option) {
    case 'n': wanted = atoi(optarg); break;
    case 'g': names = optarg; break;
    case 'm': capacity = atoll(optarg); break;
    case 's': share = atoll(optarg); break;
    case 'f': hold_for = atof(optarg); break;
    case 't': deadline = now() + atof(optarg); break;
    default: return 64;
    }
  for (char *uuid = names ? strtok(names, ",") : NULL; uuid; uuid = strtok(NULL, ",")) add_gpu(uuid);
  qsort(gpus, (size_t)gpu_count, sizeof *gpus, by_uuid);
  bool is_sound = wanted > 0 && wanted <= gpu_count && share >= 0 && share <= capacity && capacity > 0;
  if (!argv[optind] || !is_sound || !(hold_for < 1e12)) /* a time that is no number would make the entry unreadable */
    errx(64, "usage: client -n N -g UUID,... [-m BYTES] [-s BYTES] [-f SECONDS] [-t SECONDS] COMMAND [ARGUMENT ...]");
  find_state_directory();
  claim();
  become(argv + optind);
}
