/* A client of safe_gpu/coordination/PROTOCOL.md, written from that page, with much of what the example, ../client.c,
 * leaves out. Each part has the name of the section that it is of, and they stand in the order of the page: Files and
 * Entries in entries.h, which is included below, and all from Doors on here. The steps of a claim, which use all the
 * rest, stand last. Reading JSON, /proc and what else is no part of the protocol is in helpers.h.
 *
 *   cc -std=c11 -o client client.c
 *   client -n N -g UUID,UUID,... [-m BYTES] [-s BYTES] [-f SECONDS] [-t SECONDS] COMMAND [ARGUMENT ...]
 *
 * It claims N of the GPUs, waits for them in the queue (for ever, or -t seconds), and becomes COMMAND, which then holds
 * the claim. UUID@GPU is a piece of a GPU, UUID@GPU+MODE one in a mode, UUID=GPU a GPU that has two names; the pieces
 * of a GPU stand together, and where there are any N is 1. -m: the capacity of each GPU. -s: a share of each, else all
 * of it. -f: for how many seconds they will be held. Exit: 75 no GPUs, 70 anything else that failed, 64 usage.
 *
 * It knows no driver: set poll_driver. Left out: contexts, displays, faults, the history, the file of settings, a turn
 * of its own, passing those who wait ahead, kernels without locks of open file descriptions, and claims inside claims,
 * which for_tests.c adds. */
#include "helpers.h"

enum { MOST_GPUS = 64, MOST_PIDS = 64, MOST_DOORS = 8, UUID_SIZE = 101, MODE_SIZE = 9 };

enum { PARTS = 32 }; /* that shares of a GPU may have; as many further ones are of its pieces */

static const long long ALL = 1LL << 60; /* bytes of a GPU that is not shared */

struct gpu { /* or a piece of one */
  char uuid[UUID_SIZE], whole[UUID_SIZE], mode[MODE_SIZE]; /* whole: the name of its GPU, the same in all modes */
  bool is_piece;
  /* What the driver says: */
  bool is_gone;
  long pids[MOST_PIDS];
  int pid_count;
  /* What this attempt has found: */
  bool is_closed, is_busy, is_elsewhere; /* elsewhere: a door is held by who has no entry here */
  /* What this process has: */
  bool is_chosen;
  int doors[MOST_DOORS], door_count;
  int part[2], part_of_pieces; /* part: by each of its names, uuid and whole; -1: none */
  uint64_t parts_here[2];      /* those that counted as parts of entries here, a bit for each */
};

static struct gpu gpus[MOST_GPUS];
static int gpu_count, wanted = 1;
static long long capacity = 80LL << 30, share; /* share 0: all of each GPU */
static double hold_for = -1, deadline = INFINITY, began;
static char token_hash[17], inside[17]; /* for claims inside claims; else "" */
static long pid_of_enclosing;           /* the same; else 0 */
static char door_prefix[32];            /* of a simulated host; else "" */
static bool without_doors;              /* there are no sockets */

static bool has_two_names(const struct gpu *gpu) { return !gpu->is_piece && strcmp(gpu->uuid, gpu->whole); }

static const char *name_of(const struct gpu *gpu, int name) { return name ? gpu->whole : gpu->uuid; }

static long long taken_of(const struct gpu *gpu, const char *said); /* Pieces */

#include "entries.h"

static bool takes_room(const struct entry *e); /* A claim: what is in the way */

static void do_nothing(void) {}

static void (*poll_driver)(void) = do_nothing;       /* sets is_gone, pids and pid_count of each GPU */
static void (*look_at_enclosing)(void) = do_nothing; /* for claims inside claims */

/* ---- Doors ---- */

struct door {
  struct sockaddr_un address;
  socklen_t size;
};

static struct door door(const char *format, ...) /* of a name in the table, without what stands before the UUID */
{
  struct door found = {.address.sun_family = AF_UNIX};
  char name[256], *out = found.address.sun_path + 1; /* behind a NUL byte */
  size_t room = sizeof found.address.sun_path - 1;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  for (char *p = name; (p = strchr(p, '/'));) *p = '_';
  put(out, room, "safe-gpu/1/%s%s", door_prefix, name);
  size_t length = strlen(out);
  if (length + 1 == room) die(64, "%s is too long for a door", name);
  while (length < 48) out[length++] = '.';
  found.size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
  return found;
}

static int door_socket(void)
{
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) die(70, "socket: %s", strerror(errno));
  return fd;
}

static bool is_held(struct door door)
{
  int fd = door_socket();
  bool is_free = connect(fd, (struct sockaddr *)&door.address, door.size) && errno == ECONNREFUSED;
  close(fd);
  return !is_free;
}

static bool take_door(struct gpu *gpu, struct door door) /* false: somebody holds it */
{
  int fd = door_socket();
  if (bind(fd, (struct sockaddr *)&door.address, door.size)) {
    if (errno != EADDRINUSE) die(70, "bind: %s", strerror(errno));
    close(fd);
    return false;
  }
  shutdown(fd, SHUT_RDWR);
  gpu->doors[gpu->door_count++] = raised(fd);
  return true;
}

static uint64_t bit(int part) { return part < 0 ? 0 : (uint64_t)1 << part; }

static uint64_t held_parts(const char *name) /* of shares, and in the upper half of pieces */
{
  uint64_t held = 0;
  for (int part = 0; part < 2 * PARTS; part++)
    if (is_held(door("%s.%d", name, part))) held |= bit(part);
  return held;
}

static uint64_t parts_of_entries(int gpu, int name) /* that take room, and whose process, unlike a child, has them */
{
  uint64_t parts = 0;
  for (const struct entry *e = claims.living; e < claims.living + claims.living_count; e++)
    if (e->taken[gpu] && takes_room(e) && !has_ended(e)) parts |= bit(e->part[gpu][name]);
  return parts;
}

static bool take_part(struct gpu *gpu, int name, uint64_t parts_here) /* the lowest that is free */
{
  for (int part = 0; part < PARTS && gpu->part[name] < 0; part++)
    if (!(parts_here & bit(part)) && take_door(gpu, door("%s.%d", name_of(gpu, name), part))) gpu->part[name] = part;
  return gpu->part[name] >= 0;
}

static bool take_all(struct gpu *gpu, int name) /* no part can be that of an entry here: that would take room */
{
  return take_door(gpu, door("%s", name_of(gpu, name))) && !held_parts(name_of(gpu, name));
}

static bool take_share(int i, int name) /* beside parts of entries here, whose processes are looked at twice */
{
  struct gpu *gpu = &gpus[i];
  const char *uuid = name_of(gpu, name);
  int at_first = gpu->door_count;
  if (!take_door(gpu, door("%s", uuid))) return false;
  uint64_t here = parts_of_entries(i, name);
  if (held_parts(uuid) & ~here || !take_part(gpu, name, here)) return false;
  uint64_t still_here = parts_of_entries(i, name) | bit(gpu->part[name]);
  if (held_parts(uuid) & ~still_here) return false;
  gpu->parts_here[name] = here;
  close(gpu->doors[at_first]);
  gpu->doors[at_first] = gpu->doors[--gpu->door_count];
  return true;
}

static bool has_lost_a_sharer(int i) /* whose part is held again: it may have gone to another directory */
{
  for (int name = 0; name < 2; name++) {
    uint64_t lost = gpus[i].parts_here[name] & ~parts_of_entries(i, name);
    if (lost && lost & held_parts(name_of(&gpus[i], name))) return true;
  }
  return false;
}

/* ---- A claim: what is in the way ---- */

static bool encloses(const struct entry *e, const char *hash, uid_t owner) /* whether that is the hash of its token */
{
  return *hash && !*e->inside && !strcmp(e->token, hash) && e->owner == owner && !is_nobody(owner);
}

static bool takes_room(const struct entry *e) /* of a claim of this process, on the GPUs that it names */
{
  bool is_inside = false;
  for (int i = 0; i < claims.living_count && *e->inside; i++)
    is_inside = is_inside || encloses(&claims.living[i], e->inside, e->owner);
  bool is_own = claims.own >= 0 && !strcmp(e->name, claims.own_name);
  bool is_beside = is_inside && e->owner == geteuid() && !strcmp(e->inside, inside);
  return !is_own && !encloses(e, inside, geteuid()) && (!is_inside || is_beside);
}

static bool has_room(int gpu)
{
  long long left = capacity;
  for (const struct entry *e = claims.living; e < claims.living + claims.living_count; e++)
    if (takes_room(e)) left -= e->taken[gpu] < capacity ? e->taken[gpu] : capacity;
  return left >= (share ? share : capacity);
}

/* ---- Pieces ---- */

static bool lists_pieces(const char *said, const char *gpu) /* one at least, of its "gpus" */
{
  char name[UUID_SIZE];
  const char *pieces = find(find(said, "pieces"), gpu);
  for (const char *piece = first_member(pieces); piece && *pieces == '['; piece = next_member(piece)) {
    copy_text(name, sizeof name, piece);
    if (*name && find(find(said, "gpus"), name)) return true;
  }
  return false;
}

static bool has_all_of(const char *said, const char *gpu)
{
  return find(find(said, "gpus"), gpu) || (find(find(said, "pieces"), gpu) && !lists_pieces(said, gpu));
}

static long long taken_of(const struct gpu *gpu, const char *said) /* bytes; 0: it is not in the way */
{
  char mode[MODE_SIZE];
  const char *named = find(find(said, "gpus"), gpu->uuid);
  bool has_pieces = lists_pieces(said, gpu->whole);
  if (strcmp(gpu->uuid, gpu->whole) && has_all_of(said, gpu->whole)) return ALL; /* by its GPU, or by its other name */
  if (!gpu->is_piece && (has_pieces || lists_pieces(said, gpu->uuid))) return ALL;
  copy_text(mode, sizeof mode, find(find(said, "modes"), gpu->whole));
  if (has_pieces && strcmp(mode, gpu->mode)) return ALL;
  if (!named) return has_all_of(said, gpu->uuid) ? ALL : 0;
  bool was_piece = has_pieces && find(find(find(said, "pieces"), gpu->whole), gpu->uuid);
  if (was_piece != gpu->is_piece) return ALL; /* an AMD card and its first partition may have one UUID */
  return whole_number(named, 1, ALL, ALL);
}

static bool take_part_of_pieces(struct gpu *gpu) /* before the door of a piece: it binds, then it asks */
{
  static const char *const modes[] = {"DPX", "TPX", "QPX", "CPX"};
  for (int part = PARTS; part < 2 * PARTS && gpu->part_of_pieces < 0; part++)
    if (take_door(gpu, door("%s.%d", gpu->whole, part))) gpu->part_of_pieces = part;
  if (gpu->part_of_pieces < 0) return false;
  if (*gpu->mode && !take_door(gpu, door("%s.%s.%d", gpu->whole, gpu->mode, gpu->part_of_pieces))) return false;
  if (is_held(door("%s", gpu->whole))) return false;
  for (int part = 0; part < PARTS; part++)
    if (is_held(door("%s.%d", gpu->whole, part))) return false;
  for (size_t i = 0; i < sizeof modes / sizeof *modes && *gpu->mode; i++)
    for (int part = PARTS; part < 2 * PARTS && strcmp(modes[i], gpu->mode); part++)
      if (is_held(door("%s.%s.%d", gpu->whole, modes[i], part))) return false;
  return true;
}

/* ---- Waiting ---- */

static double turn_of(const struct entry *ticket) /* without one it stands behind all lower numbers */
{
  double turn = 0;
  if (ticket->turn >= 0) return ticket->turn;
  for (const struct entry *e = queue.living; e < queue.living + queue.living_count; e++)
    if (e->number < ticket->number && !strcmp(e->inside, ticket->inside)) turn = later(turn, e->turn);
  return turn;
}

static bool is_before(const struct entry *a, const struct entry *b)
{
  double turn = turn_of(a), other = turn_of(b);
  return turn < other || (turn == other && a->number < b->number);
}

static bool competes(const struct entry *ticket)
{
  for (int i = 0; i < gpu_count; i++)
    if (ticket->taken[i] && !strcmp(ticket->inside, inside)) return true;
  return false;
}

static const struct entry *nearest_ahead(int *count) /* NULL: this process is the first; count of all who are ahead */
{
  const struct entry *nearest = NULL;
  struct entry own = {.number = atoll(queue.own_name), .turn = -1};
  put(own.inside, sizeof own.inside, "%s", inside);
  *count = 0;
  for (const struct entry *e = queue.living; e < queue.living + queue.living_count; e++) {
    bool is_own = queue.own >= 0 && !strcmp(e->name, queue.own_name);
    bool is_ahead = !is_own && competes(e) && (queue.own < 0 || is_before(e, &own));
    if (is_ahead) ++*count;
    if (is_ahead && (!nearest || is_before(nearest, e))) nearest = e;
  }
  return nearest;
}

static void keep_place(void) /* a ticket that was removed is none, nor is one whose number is not taken into account */
{
  if (queue.own >= 0 && !same_file(queue.own, queue.fd, queue.own_name)) close_fd(&queue.own);
  if (queue.own >= 0 && atoll(queue.own_name) > queue.highest) remove_entry(&queue);
}

static void sleep_on_nearest(void)
{
  struct flock unlock = whole_file(F_UNLCK);
  int count;
  const struct entry *nearest = nearest_ahead(&count);
  int fd = nearest ? open_entry(&queue, nearest->name) : -1;
  if (fd < 0) return;
  wait_for_read_lock(fd, earlier(deadline, now() + (count <= 32 ? 10 : 60)));
  fcntl(fd, F_OFD_SETLK, &unlock);
  close(fd);
}

/* ---- Busy GPUs ---- */

static bool is_of_sharer(int gpu, long pid) /* of a user who shares the GPU */
{
  uid_t owner;
  if (!share || !find_owner_of_process(pid, &owner)) return false;
  for (const struct entry *e = claims.living; e < claims.living + claims.living_count; e++)
    if (e->taken[gpu] && e->taken[gpu] < ALL && e->owner == owner) return true;
  return false;
}

static bool is_busy(int gpu)
{
  for (int i = 0; i < gpus[gpu].pid_count; i++) {
    long pid = gpus[gpu].pids[i];
    if (pid != getpid() && pid != pid_of_enclosing && !is_of_sharer(gpu, pid)) return true;
  }
  return gpus[gpu].is_gone;
}

/* ---- Closed GPUs ---- */

static void read_closed_line(const char *line)
{
  char uuid[UUID_SIZE], from[32], until[32], whom[256];
  double begin = seconds(CLOCK_REALTIME), end = begin + (hold_for < 0 ? 86400 : hold_for);
  if (sscanf(line, "%100s %31s %31s %255s", uuid, from, until, whom) != 4) return;
  bool is_drained = !strcmp(from, "-") && !strcmp(until, "-");
  bool is_reserved = begin < atof(until) && atof(from) < end && geteuid() && !is_for_me(whom);
  for (int i = 0; i < gpu_count && (is_drained || is_reserved); i++)
    if (!strcmp(gpus[i].uuid, uuid) || !strcmp(gpus[i].whole, uuid)) gpus[i].is_closed = true;
}

static void read_closed_file(int directory, const char *path, uid_t owner) /* of root or of that owner */
{
  static char lines[CLOSED_BYTES + 1];
  struct stat s;
  int fd = openat(directory, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;
  bool counts = !fstat(fd, &s) && S_ISREG(s.st_mode) && !(s.st_mode & 022) && s.st_size <= CLOSED_BYTES;
  bool is_trusted = !s.st_uid || s.st_uid == owner;
  ssize_t size = counts && is_trusted ? pread(fd, lines, CLOSED_BYTES, 0) : 0;
  close(fd);
  lines[size < 0 ? 0 : size] = 0;
  for (char *line = strtok(lines, "\n"); line; line = strtok(NULL, "\n")) read_closed_line(line);
}

static void read_closed(void) /* without host.lock: a directory service may be asked */
{
  struct stat s;
  if (fstat(state_fd, &s)) die(70, "fstat: %s", strerror(errno));
  for (int i = 0; i < gpu_count; i++) gpus[i].is_closed = false;
  read_closed_file(AT_FDCWD, "/etc/safe-gpu/closed", 0);
  read_closed_file(state_fd, "closed", s.st_uid);
}

/* ---- The older package ---- */

static int lock_older_package(bool *is_locked) /* shared, until nobody needs it; -1: there is no such file */
{
  const char *mode = getenv("SAFE_GPU_LEGACY_LOCK");
  *is_locked = true;
  if (mode && !strcmp(mode, "never")) return -1;
  int fd = open("/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users",
                O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd >= 0) *is_locked = wait_for_read_lock(fd, earlier(deadline, now() + 10));
  return fd;
}

/* ---- A claim: its steps ---- */

static bool take_all_or_share(int i, int name) { return share ? take_share(i, name) : take_all(&gpus[i], name); }

static bool (*take_doors_of_name)(int i, int name) = take_all_or_share; /* other doors for claims inside claims */

static bool take_doors(int i)
{
  struct gpu *gpu = &gpus[i];
  if (without_doors) return true;
  if (gpu->is_piece && !take_part_of_pieces(gpu)) return false;
  return take_doors_of_name(i, 0) && (!has_two_names(gpu) || take_doors_of_name(i, 1));
}

static void close_doors(struct gpu *gpu)
{
  while (gpu->door_count) close(gpu->doors[--gpu->door_count]);
  gpu->part[0] = gpu->part[1] = gpu->part_of_pieces = -1;
  gpu->parts_here[0] = gpu->parts_here[1] = 0;
}

static bool could_do(int i)
{
  return !gpus[i].is_closed && !gpus[i].is_busy && !gpus[i].is_elsewhere && has_room(i);
}

static void release(void) /* 6: a door that is free must not be that of an entry here */
{
  remove_entry(&claims);
  for (int i = 0; i < gpu_count; i++) {
    close_doors(&gpus[i]);
    gpus[i].is_chosen = false;
  }
  next_fd = LOWEST_FD;
}

static int by_uuid(const void *a, const void *b)
{
  const int *x = a, *y = b;
  return strcmp(gpus[*x].uuid, gpus[*y].uuid);
}

static bool choose_and_take_doors(void) /* 2 and 3: of enough GPUs, or of none */
{
  for (;;) {
    int chosen[MOST_GPUS], count = 0, taken = 0;
    for (int i = 0; i < gpu_count && count < wanted; i++)
      if (could_do(i)) chosen[count++] = i;
    if (count < wanted) return false;
    qsort(chosen, (size_t)count, sizeof *chosen, by_uuid);
    while (taken < count && take_doors(chosen[taken])) gpus[chosen[taken++]].is_chosen = true;
    if (taken == count) return true;
    gpus[chosen[taken]].is_elsewhere = true; /* choose again without it */
    release();
  }
}

static bool may_stay(void) /* 4, when host.lock has been given back */
{
  list(&claims);
  remove_dead(&claims);
  read_closed();
  look_at_enclosing();
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].is_chosen && (gpus[i].is_closed || !has_room(i) || has_lost_a_sharer(i))) return false;
  return directories_are_current();
}

static bool is_still_free(void) /* 5: nobody came between the poll and the entry */
{
  bool is_free;
  int older = lock_older_package(&is_free);
  poll_driver();
  for (int i = 0; i < gpu_count; i++) is_free = is_free && !(gpus[i].is_chosen && is_busy(i));
  close_fd(&older);
  return is_free;
}

enum outcome { CLAIMED, WITHDREW, NOT_FREE, BEHIND };

static enum outcome attempt(void)
{
  int count;
  poll_driver(); /* 1 */
  if (!open_directories()) return WITHDREW;
  read_closed();
  int host_lock = lock_host(); /* 2 */
  if (host_lock < 0) return WITHDREW;
  list(&claims);
  list(&queue);
  keep_place();
  look_at_enclosing();
  for (int i = 0; i < gpu_count; i++) {
    gpus[i].is_busy = is_busy(i);
    gpus[i].is_elsewhere = false;
  }
  bool is_first = !nearest_ahead(&count);
  bool has_doors = is_first && choose_and_take_doors(); /* 3 */
  bool is_made = has_doors && make_entry(&claims);      /* 4 */
  if (!has_doors && queue.own < 0 && now() < deadline) make_entry(&queue);
  close(host_lock);
  remove_dead(&claims);
  remove_dead(&queue);
  if (is_made && may_stay() && is_still_free()) {
    remove_entry(&queue); /* after the poll, so that it need not come back */
    return CLAIMED;
  }
  release();
  if (has_doors) return WITHDREW;
  return is_first ? NOT_FREE : BEHIND;
}

static bool any_is_elsewhere(void)
{
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i].is_elsewhere) return true;
  return false;
}

static void watch(void) /* the claims, as the head of the queue, until the driver is to be polled again */
{
  double until = earlier(deadline, now() + 0.1);
  for (int free_gpus = 0; free_gpus < wanted && now() < until;) {
    nap(0.01, 0.02);
    list(&claims);
    free_gpus = 0;
    for (int i = 0; i < gpu_count; i++) free_gpus += could_do(i);
  }
}

static void claim(void)
{
  double withdraws_until = INFINITY;
  for (bool has_looked_again = false;;) {
    enum outcome outcome = attempt();
    bool is_late = now() >= deadline;
    if (outcome == CLAIMED) return;
    if (outcome == WITHDREW) withdraws_until = earlier(withdraws_until, now() + 1);
    if (outcome == WITHDREW && (!is_late || now() < withdraws_until)) {
      nap(0.0005, 0.01);
    } else if (is_late && any_is_elsewhere() && !has_looked_again) {
      has_looked_again = true; /* a dying process closes its doors one by one */
      nap(0.005, 0.005);
    } else if (is_late) {
      remove_entry(&queue);
      die(75, "%d of these GPUs were not free in time", wanted);
    } else if (outcome == BEHIND) {
      sleep_on_nearest();
    } else {
      watch();
    }
  }
}

static _Noreturn void become(char **argv) /* with the descriptors of the directory, the entry and the doors */
{
  char visible[MOST_GPUS * UUID_SIZE] = "", bytes[32];
  fcntl(state_fd, F_SETFD, 0);
  fcntl(claims.own, F_SETFD, 0);
  for (int i = 0; i < gpu_count; i++) {
    for (int k = 0; k < gpus[i].door_count; k++) fcntl(gpus[i].doors[k], F_SETFD, 0);
    if (gpus[i].is_chosen && *visible) strcat(visible, ",");
    if (gpus[i].is_chosen) strcat(visible, gpus[i].uuid);
  }
  setenv("CUDA_VISIBLE_DEVICES", visible, 1);
  put(bytes, sizeof bytes, "%lld", share);
  if (share) setenv("SAFE_GPU_SHARE", bytes, 1);
  execvp(argv[0], argv);
  die(70, "%s: %s", argv[0], strerror(errno));
}

/* ---- The command line ---- */

static void add_gpu(const char *spelt) /* UUID, UUID=GPU, UUID@GPU or UUID@GPU+MODE */
{
  struct gpu *gpu = &gpus[gpu_count++];
  size_t length = strcspn(spelt, "@=");
  const char *whole = spelt[length] ? spelt + length + 1 : spelt;
  const char *mode = strchr(whole, '+');
  size_t length_of_whole = strcspn(whole, "+");
  if (length >= UUID_SIZE || length_of_whole >= UUID_SIZE) die(64, "%s is no UUID", spelt);
  if (strpbrk(spelt, "\"\\")) die(64, "%s cannot stand in JSON", spelt);
  gpu->is_piece = spelt[length] == '@';
  put(gpu->uuid, UUID_SIZE, "%.*s", (int)length, spelt);
  put(gpu->whole, UUID_SIZE, "%.*s", (int)length_of_whole, whole);
  put(gpu->mode, MODE_SIZE, "%s", mode ? mode + 1 : "");
  close_doors(gpu);
}

static void prepare(const char *program)
{
  char path[4096];
  const char *given = getenv("SAFE_GPU_DIR"), *slash = strrchr(program, '/');
  put(path, sizeof path, "%s", given && *given ? given : "/tmp/safe-gpu");
  for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
  if (*path != '/' || !path[1]) die(70, "%s is no absolute path of a directory", path);
  put(state_name, sizeof state_name, "%s", strrchr(path, '/') + 1);
  put(state_parent, sizeof state_parent, "%.*s", (int)(strrchr(path, '/') + 1 - path), path);
  put_printable(command, sizeof command, slash ? slash + 1 : program);
  gethostname(path, sizeof path - 1);
  put_printable(host, sizeof host, path);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  without_doors = fd < 0 && errno != EMFILE && errno != ENFILE;
  if (without_doors) fputs("client: warning: no sockets, so the claim holds by its file alone\n", stderr);
  close_fd(&fd);
}

int main(int argc, char **argv)
{
  int option, pieces = 0;
  char *listed = NULL;
  began = now();
  while ((option = getopt(argc, argv, "+n:g:m:s:f:t:")) != -1) switch (option) {
    case 'n': wanted = atoi(optarg); break;
    case 'g': listed = optarg; break;
    case 'm': capacity = atoll(optarg); break;
    case 's': share = atoll(optarg); break;
    case 'f': hold_for = atof(optarg); break;
    case 't': deadline = began + atof(optarg); break;
    default: die(64, "unknown option");
    }
  for (char *uuid = listed ? strtok(listed, ",") : NULL; uuid && gpu_count < MOST_GPUS; uuid = strtok(NULL, ","))
    add_gpu(uuid);
  for (int i = 0; i < gpu_count; i++) pieces += gpus[i].is_piece;
  if (!argv[optind] || wanted < 1 || wanted > gpu_count || (pieces && wanted > 1) || share < 0 || share > capacity)
    die(64, "usage: client -n N -g UUID,... [-m BYTES] [-s BYTES] [-f SECONDS] [-t SECONDS] COMMAND [ARGUMENT ...]");
  prepare(argv[optind]);
  claim();
  become(argv + optind);
}
