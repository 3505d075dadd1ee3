/* The simplest client of safe_gpu/coordination/PROTOCOL.md, written from that page alone.
 *
 *   client -n N -g UUID,UUID,... [-m BYTES] [-s BYTES] [-i] [-f SECONDS] [-t SECONDS] [-p PRESET] COMMAND [ARGUMENT ...]
 *
 * It claims N of the GPUs, waits for them in the queue (for ever, or -t seconds), and becomes COMMAND, which then holds
 * the claim. UUID@GPU is a piece of a GPU, UUID@GPU+MODE one in a mode, UUID=GPU a GPU that has two names. N is 1 where
 * there are pieces. -m: the capacity of each GPU. -s: a share of each, else all of it. -i: claims inside this one are allowed.
 * -f: for how many seconds the GPUs will be held. -p: the processes on the GPUs are files of the simulated host PRESET;
 * without it none are known. Exit: 75 no GPUs, 70 anything else that failed, 64 usage.
 *
 * Left out: passing those who wait ahead, faults, the history, contexts, displays, processes that only draw, the file
 * of settings, a turn of its own. It needs locks of open file descriptions. This file is the protocol. What it needs
 * beside that, and what only tests need, is in client_parts.h: words, SHA-256, JSON, /proc, bounds by owner, claims
 * inside claims, the driver of simulated hosts, the lock of the older package, the command line.
 *
 * cc -std=c11 -Wall -Wextra -Werror -o client client.c
 * Builds that must be caught: -DONE_LISTING takes its time to name its entry, and does not list again, -DNO_DOORS takes
 * none, -DNO_QUEUE ignores those who wait ahead, -DNO_ROOM takes what others hold, -DNO_PART takes pieces without a part
 * of their GPU. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
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
#include <sys/time.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 64, UUID_SIZE = 101, NAME_SIZE = 40, TEXT = 64 * 1024, PARTS = 32, DOORS = 8, MODE_SIZE = 9, KEPT = 500 };

enum { /* bounds of an entry, and of the files of one user in a directory */
  ENTRY = 32 * 1024,
  VALUES = 2048,
  FILES = 2048,
  BYTES = 4 * 1024 * 1024
};

struct gpu {
  char uuid[UUID_SIZE], whole[UUID_SIZE], mode[MODE_SIZE]; /* whole: the name of its GPU, the same in all modes */
  bool is_piece;
  bool chosen, busy, closed, inside; /* inside: the enclosing claim holds it */
  bool elsewhere;                    /* a door is held by who has no entry here */
  bool by_entry;                     /* the enclosing claim had no sockets */
  bool there;                        /* by the latest poll */
  int doors[DOORS], door_count;
  int part[2];        /* of each of its names, uuid and whole; -1: none */
  int part_of_pieces; /* of its GPU, as long as this is a piece that is held; -1: none */
  unsigned parts_here[2]; /* a bit for each part that counted as that of an entry here */
};

struct entry { /* of a living claim, or of a waiter */
  uid_t uid;
  long long number, pid, start, pidns, nb_gpus;
  char name[NAME_SIZE], token[17], inside[17];
  long long bytes[GPUS]; /* of each of our GPUs; 0: none, -1: all of it, or wanted */
  int part[GPUS][2];     /* by each name of our GPU; -1: none */
  bool has_pieces[GPUS]; /* of the GPU of one of ours */
  char mode[GPUS][MODE_SIZE];
};

struct directory {
  const char *name;
  int fd;
  struct entry *living;
  int count, room;
  long long highest; /* of the numbers that count */
  bool is_full;      /* no more files of ours would count */
  int mine;          /* our entry in it; -1: none */
  char mine_name[NAME_SIZE];
};

static struct gpu gpus[GPUS];
static int gpu_count, wanted = 1, state_fd = -1, next_fd = KEPT;
static long long capacity = 80LL << 30, share;
static double hold_for = -1, deadline = -1, queued = -1, began;
static struct directory claims = {.name = "claims", .fd = -1, .mine = -1}, queue = {.name = "queue", .fd = -1, .mine = -1};
static char state_path[4096], simulated[4096], door_prefix[64], token[17], token_hash[17], inside[17], command[256];
static const char *preset, *scope;
static bool without_doors;

static bool has_two_names(const struct gpu *gpu) { return !gpu->is_piece && strcmp(gpu->uuid, gpu->whole); }

#include "client_parts.h"

/* ---- what an entry says ---- */

static void note_gpu(struct entry *e, int i, const char *name, long long bytes)
{
  if (!strcmp(gpus[i].uuid, name) && e->bytes[i] != -1) e->bytes[i] = bytes;
  /* All of its GPU or a share of it is in the way of a piece; and what has two names is one. */
  if (strcmp(gpus[i].uuid, name) && !strcmp(gpus[i].whole, name)) e->bytes[i] = -1;
}

static void note_of_gpu(struct entry *e, int i, const char *above, const char *key, const char *word, bool is_text)
{
  bool is_uuid = !strcmp(gpus[i].uuid, key), is_whole = !strcmp(gpus[i].whole, key), is_list = !is_text && !*word;
  if (!strcmp(above, "gpus") && *key) note_gpu(e, i, key, whole_number(word, is_text, 1, 1LL << 60)); /* -1: all */
  if (!strcmp(above, "gpus") && !*key && is_text) note_gpu(e, i, word, -1);
  int part = (int)whole_number(word, is_text, 0, PARTS - 1); /* higher ones are of pieces, and vouch for no door */
  if (!strcmp(above, "parts") && is_uuid) e->part[i][0] = part;
  if (!strcmp(above, "parts") && is_whole) e->part[i][1] = part;
  if (!strcmp(above, "pieces") && (is_uuid || is_whole) && is_list) e->has_pieces[i] = true;
  if (!strcmp(above, "pieces") && (is_uuid || is_whole) && !is_list) e->bytes[i] = -1; /* it has all of that GPU */
  if (!strcmp(above, "modes") && is_whole && is_text) put(e->mode[i], MODE_SIZE, "%s", word);
}

static void note(struct entry *e, const char *above, const char *key, const char *word, bool is_text)
{
  if (!*above && !strcmp(key, "token") && is_text) put(e->token, sizeof e->token, "%s", word);
  if (!*above && !strcmp(key, "inside") && is_text) put(e->inside, sizeof e->inside, "%s", word);
  if (!*above && !strcmp(key, "nb_gpus")) e->nb_gpus = number_or_0(word, is_text, 256);
  if (!*above && !strcmp(key, "pid")) e->pid = number_or_0(word, is_text, 1LL << 62);
  if (!*above && !strcmp(key, "start")) e->start = number_or_0(word, is_text, 1LL << 62);
  if (!*above && !strcmp(key, "pidns")) e->pidns = number_or_0(word, is_text, 1LL << 62);
  for (int i = 0; *above && i < gpu_count; i++) note_of_gpu(e, i, above, key, word, is_text);
}

static void judge_pieces(struct entry *e) /* when all of it is read, since "modes" may stand first */
{
  for (int i = 0; i < gpu_count; i++)
    if (e->has_pieces[i] && (!gpus[i].is_piece || strcmp(gpus[i].mode, e->mode[i]))) e->bytes[i] = -1;
}

/* ---- files and directories ---- */

static bool same_file(int fd, int dir, const char *name)
{
  struct stat a, b;
  return !fstat(fd, &a) && !fstatat(dir, name, &b, AT_SYMLINK_NOFOLLOW) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static int raised(int fd) /* the same, higher than all before it, and where a shell's redirections do not reach */
{
  int high = fcntl(fd, F_DUPFD_CLOEXEC, next_fd);
  if (high < 0) die(70, "no descriptors: %s", strerror(errno));
  close(fd);
  next_fd = high + 1;
  return high;
}

static void temporary_name(char out[NAME_SIZE])
{
  *out = '.';
  hexadecimal(out + 1);
}

static void make_directory(int parent, const char *name)
{
  char temporary[NAME_SIZE];
  temporary_name(temporary);
  if (mkdirat(parent, temporary, 0700)) return;
  int fd = openat(parent, temporary, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0 || fchmod(fd, 01777) || renameat2(parent, temporary, parent, name, RENAME_NOREPLACE))
    unlinkat(parent, temporary, AT_REMOVEDIR);
  close_fd(&fd);
}

static int open_directory(int parent, const char *name) /* -1: the one above was removed */
{
  struct stat s;
  int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) {
    make_directory(parent, name);
    fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  }
  if (fd < 0 && errno == ENOENT) return -1;
  if (fd < 0 || fstat(fd, &s)) die(70, "%s cannot be opened: %s", name, strerror(errno));
  if (!is_local(fd)) die(70, "%s is not on a local file system", name);
  if ((s.st_mode & 07777) != 01777 && s.st_uid != geteuid() && faccessat(fd, ".", W_OK | X_OK, AT_EACCESS))
    die(70, "%s has mode %o and belongs to another user", name, s.st_mode & 07777);
  return fd;
}

static bool is_current(void)
{
  return state_fd >= 0 && same_file(state_fd, AT_FDCWD, state_path) && same_file(claims.fd, state_fd, "claims") &&
         same_file(queue.fd, state_fd, "queue");
}

static void open_directories(void) /* also where somebody has removed them: a ticket in them is nobody's */
{
  static int kept = -1;
  char *slash = strrchr(state_path, '/');
  for (int i = 0; i < 100 && !is_current(); i++) {
    int *all[] = {&state_fd, &claims.fd, &queue.fd, &queue.mine, &kept};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) close_fd(all[k]);
    *slash = 0;
    int parent = open(*state_path ? state_path : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    *slash = '/';
    if (parent < 0) die(70, "%s: %s", state_path, strerror(errno));
    state_fd = open_directory(parent, slash + 1);
    close(parent);
    if (state_fd < 0) continue;
    claims.fd = open_directory(state_fd, "claims");
    queue.fd = open_directory(state_fd, "queue");
    kept = openat(state_fd, ".", O_RDONLY | O_DIRECTORY); /* COMMAND keeps it, too */
    if (kept >= 0 && flock(kept, LOCK_SH | LOCK_NB)) close_fd(&kept);
  }
  if (!is_current()) die(70, "%s is removed again and again", state_path);
}

static int lock_host(void) /* -1: the directory was removed */
{
  double since = now();
  for (;;) {
    int fd = openat(state_fd, "host.lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
      char temporary[NAME_SIZE];
      temporary_name(temporary);
      fd = openat(state_fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
      if (fd < 0 && errno == ENOENT) return -1;
      if (fd >= 0 && (fchmod(fd, 0666) || renameat2(state_fd, temporary, state_fd, "host.lock", RENAME_NOREPLACE))) {
        unlinkat(state_fd, temporary, 0);
        close(fd);
        continue;
      }
    }
    if (fd < 0) die(70, "host.lock cannot be opened: %s", strerror(errno));
    while (flock(fd, LOCK_EX | LOCK_NB)) {
      double waited = now() - since;
      if (waited > 10 && deadline >= 0 && now() >= deadline) die(70, "host.lock is held for %.0f s", waited);
      nap(0.001, waited < 0.1 ? 0.005 : 0.1);
    }
    if (same_file(fd, state_fd, "host.lock")) return fd;
    close(fd);
  }
}

/* ---- entries ---- */

static struct {
  int dir;
  char name[NAME_SIZE];
} dead[1024]; /* of this user: they are removed when host.lock has been given back */
static int dead_count;

static void note_dead(int dir, const char *name, uid_t owner)
{
  if (dead_count == 1024 || (geteuid() && geteuid() != owner)) return;
  dead[dead_count].dir = dir;
  put(dead[dead_count++].name, NAME_SIZE, "%s", name);
}

static void remove_dead(void)
{
  while (dead_count) dead_count--, unlinkat(dead[dead_count].dir, dead[dead_count].name, 0);
}

static bool is_locked(int fd)
{
  struct flock lock = whole_file(F_WRLCK);
  if (fcntl(fd, F_OFD_GETLK, &lock)) die(70, "F_OFD_GETLK: %s", strerror(errno));
  return lock.l_type == F_WRLCK && !lock.l_start && !lock.l_len;
}

static bool is_hexadecimal(const char *s) { return strspn(s, "0123456789abcdef") == 16 && !s[16]; }

static bool is_name(const char *name, long long *number)
{
  size_t digits = strspn(name, "0123456789");
  if (!digits || digits > 18 || (*name == '0' && digits > 1) || name[digits] != '.') return false;
  *number = atoll(name);
  return is_hexadecimal(name + digits + 1);
}

static int open_entry(int dir, const char *name) /* -1: it is ignored */
{
  int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno != ENOENT && errno != ELOOP && errno != EACCES && errno != EPERM &&
      errno != ENXIO && errno != EWOULDBLOCK)
    die(70, "%s: %s", name, strerror(errno));
  return fd;
}

struct name { /* in a directory, and the file that it is of */
  char text[NAME_SIZE];
  long long number;
  struct stat file;
  bool was_there; /* when it was opened */
};

static bool is_of(const struct name *name, const struct stat *s)
{
  return name->file.st_dev == s->st_dev && name->file.st_ino == s->st_ino && name->file.st_uid == s->st_uid &&
         name->file.st_size == s->st_size;
}

static bool may_be_entry(const struct stat *s) { return S_ISREG(s->st_mode) && !(s->st_mode & 022) && s->st_size <= ENTRY; }

static void read_entry(struct directory *d, struct name *name)
{
  static char data[TEXT + 1];
  struct entry e = {.number = name->number};
  struct stat s;
  int fd = open_entry(d->fd, name->text);
  if (fd < 0) return;
  if (fstat(fd, &s)) die(70, "fstat: %s", strerror(errno));
  name->was_there = is_of(name, &s); /* else somebody has put another file there, which the next listing reads */
  if (name->was_there && !is_locked(fd)) {
    note_dead(d->fd, name->text, s.st_uid);
  } else if (name->was_there && may_be_entry(&s)) {
    ssize_t n = pread(fd, data, ENTRY, 0);
    data[n < 0 ? 0 : n] = 0;
    for (int i = 0; i < GPUS; i++) e.part[i][0] = e.part[i][1] = -1;
    e.uid = s.st_uid;
    put(e.name, sizeof e.name, "%s", name->text);
    at = data, bad = has_too_many_values(data);
    blanks();
    bad = bad || *at != '{';
    if (!bad) value(&e, "", "", 0);
    judge_pieces(&e);
    bad = bad || (d == &queue) != (e.nb_gpus > 0);
    if (!bad && d->count == d->room && !(d->living = realloc(d->living, (size_t)(d->room += 256) * sizeof e)))
      die(70, "no memory");
    if (!bad) d->living[d->count++] = e;
  }
  close(fd);
}

static int by_age(const void *a, const void *b) /* of names: by number, then by what is random in them */
{
  const struct name *x = a, *y = b;
  return x->number == y->number ? strcmp(x->text, y->text) : (x->number > y->number) - (x->number < y->number);
}

/* The names that may be of entries, by age; their number. */
static int names_in(struct directory *d, struct name **names)
{
  static struct name *found;
  static int room;
  int count = 0, fd = openat(d->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *directory = fd < 0 ? NULL : fdopendir(fd);
  struct stat s;
  if (!directory) die(70, "%s cannot be listed: %s", d->name, strerror(errno));
  for (struct dirent *one; (one = readdir(directory));) {
    long long number;
    if (is_name(one->d_name, &number)) {
      if (count == room && !(found = realloc(found, (size_t)(room += 1024) * sizeof *found))) die(70, "no memory");
      found[count] = (struct name){.number = number};
      put(found[count++].text, NAME_SIZE, "%s", one->d_name);
    } else if (*one->d_name == '.' && is_hexadecimal(one->d_name + 1) && dead_count < 1024 &&
               !fstatat(d->fd, one->d_name, &s, AT_SYMLINK_NOFOLLOW) && time(NULL) - s.st_mtime > 60) {
      note_dead(d->fd, one->d_name, s.st_uid);
    }
  }
  closedir(directory);
  if (count) qsort(found, (size_t)count, sizeof *found, by_age);
  *names = found;
  return count;
}

/* Whether one of the names before is of the same file, which has been opened. It must be there still: an inode number
 * that is free comes again. Of nobody's files each name is a file of its own. */
static bool is_known(const struct directory *d, const struct name *names, const int *counted, int count, int place)
{
  struct stat s;
  if (names[place].file.st_nlink < 2 || is_nobody(names[place].file.st_uid)) return false;
  for (int i = 0; i < count; i++) {
    const struct name *other = &names[counted[i]];
    if (is_of(other, &names[place].file) && other->was_there)
      return !fstatat(d->fd, other->text, &s, AT_SYMLINK_NOFOLLOW) && is_of(other, &s);
  }
  return false;
}

static void list(struct directory *d)
{
  struct name *names;
  struct owner *owners = NULL;
  int count = names_in(d, &names), owner_count = 0, counted_count = 0;
  int *counted = malloc(((size_t)count + 1) * sizeof *counted);
  if (!counted) die(70, "no memory");
  d->count = 0;
  d->highest = 0;
  for (int i = 0; i < count && names[i].number - d->highest <= 10000000; i++) d->highest = names[i].number;
  for (int i = 0; i < count; i++)
    if (fstatat(d->fd, names[i].text, &names[i].file, AT_SYMLINK_NOFOLLOW)) names[i].file.st_mode = 0; /* it is gone */
  for (int i = 0; i < count; i++) {
    if (!may_be_entry(&names[i].file)) continue;
    struct owner *owner = owner_of(names[i].file.st_uid, &owners, &owner_count);
    if (owner->is_over || is_known(d, names, counted, counted_count, i)) continue;
    owner->files++;
    owner->bytes += names[i].file.st_size;
    owner->is_over = owner->is_bounded && (owner->files > FILES || owner->bytes > BYTES);
    if (owner->is_over) continue; /* and all behind it */
    counted[counted_count++] = i;
    read_entry(d, &names[i]);
  }
  struct owner *own = owner_of(geteuid(), &owners, &owner_count);
  d->is_full = own->is_bounded && (own->files >= FILES || own->bytes + ENTRY > BYTES);
  free(counted);
  free(owners);
}

static void cap_tickets(void) /* of one user 1,000 count */
{
  int kept = 0;
  for (int i = 0; i < queue.count; i++) {
    int before = 0;
    for (int k = 0; queue.living[i].uid && k < kept; k++) before += queue.living[k].uid == queue.living[i].uid;
    if (before < 1000) queue.living[kept++] = queue.living[i];
  }
  queue.count = kept;
}

static bool was_my_ticket_left_out(void) /* its number is not taken into account: who comes now would stand ahead */
{
  return queue.mine >= 0 && atoll(queue.mine_name) > queue.highest;
}

static bool is_mine(const struct directory *d, const struct entry *e)
{
  return d->mine >= 0 && !strcmp(e->name, d->mine_name);
}

static bool is_written(int i, bool ticket) { return ticket ? !*inside || gpus[i].inside : gpus[i].chosen; }

static void write_part(FILE *out, int before, const char *name, int part)
{
  if (before) fputc(',', out);
  write_text(out, name);
  fprintf(out, ":%d", part);
}

static void write_pieces(FILE *out, bool ticket) /* and the modes of their GPUs */
{
  int count = 0, modes = 0;
  fputs(",\"pieces\":{", out);
  for (int i = 0; i < gpu_count; i++) {
    bool is_first = true, is_said = gpus[i].is_piece || has_two_names(&gpus[i]);
    for (int k = 0; k < i; k++) is_first = is_first && !(is_written(k, ticket) && !strcmp(gpus[k].whole, gpus[i].whole));
    if (!is_said || !is_first || !is_written(i, ticket)) continue;
    if (count++) fputc(',', out);
    write_text(out, gpus[i].whole);
    fputs(":[", out);
    for (int k = i, n = 0; k < gpu_count; k++) {
      if (!gpus[k].is_piece || strcmp(gpus[k].whole, gpus[i].whole) || !is_written(k, ticket)) continue;
      if (n++) fputc(',', out);
      write_text(out, gpus[k].uuid);
    }
    fputc(']', out);
  }
  fputs("},\"modes\":{", out);
  for (int i = 0; i < gpu_count; i++) {
    if (!*gpus[i].mode || !is_written(i, ticket)) continue;
    if (modes++) fputc(',', out);
    write_text(out, gpus[i].whole);
    fputc(':', out);
    write_text(out, gpus[i].mode);
  }
  fputc('}', out);
}

static void write_gpus(FILE *out, bool ticket)
{
  int n = 0;
  fprintf(out, "\"gpus\":%c", ticket ? '[' : '{');
  for (int i = 0; i < gpu_count; i++) {
    if (!is_written(i, ticket)) continue;
    if (n++) fputc(',', out);
    write_text(out, gpus[i].uuid);
    if (!ticket && share) fprintf(out, ":%lld", share);
    else if (!ticket) fputs(":null", out);
  }
  fprintf(out, "%c,\"parts\":{", ticket ? ']' : '}');
  n = 0;
  for (int i = 0; i < gpu_count && !ticket; i++) {
    const struct gpu *gpu = &gpus[i];
    if (!gpu->chosen) continue;
    if (gpu->part[0] >= 0) write_part(out, n++, gpu->uuid, gpu->part[0]);
    if (gpu->part[1] >= 0 && has_two_names(gpu)) write_part(out, n++, gpu->whole, gpu->part[1]);
    if (gpu->part_of_pieces >= 0) write_part(out, n++, gpu->whole, gpu->part_of_pieces);
  }
  fputc('}', out);
  write_pieces(out, ticket);
}

static void write_time(FILE *out, const char *key, double when)
{
  if (when < 0) fprintf(out, ",\"%s\":null", key);
  else fprintf(out, ",\"%s\":%.3f", key, when);
}

static char *entry_text(bool ticket, size_t *size)
{
  char *body = NULL, host[256] = "", state;
  long long start = 0;
  double since = seconds(CLOCK_REALTIME);
  FILE *out = open_memstream(&body, size);
  if (!out) die(70, "no memory");
  if (!read_process(getpid(), &state, &start)) start = 0;
  gethostname(host, sizeof host - 1);
  fprintf(out, "{\"v\":1,\"pid\":%d,\"start\":%lld,\"pidns\":%lld,\"host\":", (int)getpid(), start, pid_namespace());
  write_text(out, host);
  fputs(",\"job\":\"\",\"command\":", out);
  write_text(out, command);
  write_time(out, "since", since);
  write_time(out, "until", hold_for >= 0 && !ticket ? since + hold_for : -1);
  write_time(out, "queued", ticket ? since : queued);
  fprintf(out, ",\"display\":false,\"token\":\"%s\",\"inside\":\"%s\",", ticket || *inside ? "" : token_hash, inside);
  write_gpus(out, ticket);
  if (ticket) {
    fprintf(out, ",\"nb_gpus\":%d", wanted);
    if (share) fprintf(out, ",\"share\":%lld", share);
    write_time(out, "hold_for", hold_for);
    queued = since;
  } else {
    write_time(out, "waited", now() - began);
  }
  fputs("}\n", out);
  if (fclose(out)) die(70, "no memory");
  return body;
}

static void remove_entry(struct directory *d)
{
  struct flock lock = whole_file(F_UNLCK);
  if (d->mine < 0) return;
  if (same_file(d->mine, d->fd, d->mine_name)) unlinkat(d->fd, d->mine_name, 0);
  fcntl(d->mine, F_OFD_SETLK, &lock);
  close_fd(&d->mine);
}

static bool make_entry(struct directory *d) /* false: somebody has removed what was made, or dead ones are in the way */
{
  char temporary[NAME_SIZE];
  if (d->is_full && dead_count) return false;
  if (d->is_full) die(70, "%s has as many files of yours as count", d->name);
  size_t size;
  char *body = entry_text(d == &queue, &size);
  struct flock lock = whole_file(F_WRLCK);
  temporary_name(temporary);
  d->mine = openat(d->fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (d->mine < 0 && errno == ENOENT) return free(body), false;
  if (d->mine < 0 || write(d->mine, body, size) != (ssize_t)size || fcntl(d->mine, F_OFD_SETLK, &lock) ||
      fchmod(d->mine, 0644)) {
    int error = errno;
    unlinkat(d->fd, temporary, 0);
    die(70, "no entry can be made in %s: %s", d->name, strerror(error));
  }
  free(body);
#ifdef ONE_LISTING
  nap(0, 0.01);
#endif
  d->mine = raised(d->mine);
  put(d->mine_name, NAME_SIZE, "%lld.", d->highest + 1);
  hexadecimal(d->mine_name + strlen(d->mine_name));
  if (renameat2(d->fd, temporary, d->fd, d->mine_name, RENAME_NOREPLACE) && (errno == EINVAL || errno == ENOSYS) &&
      !linkat(d->fd, temporary, d->fd, d->mine_name, 0))
    unlinkat(d->fd, temporary, 0);
  if (same_file(d->mine, d->fd, d->mine_name)) return true;
  close_fd(&d->mine);
  return false;
}

/* ---- doors ---- */

static socklen_t address_of(struct sockaddr_un *a, const char *uuid, const char *tail)
{
  char name[sizeof a->sun_path], safe[UUID_SIZE];
  put(safe, sizeof safe, "%s", uuid);
  for (char *p = safe; (p = strchr(p, '/'));) *p = '_';
  put(name, sizeof name, "safe-gpu/1/%s%s%s", door_prefix, safe, tail);
  size_t n = strlen(name);
  while (n < 48) name[n++] = '.';
  memset(a, 0, sizeof *a);
  a->sun_family = AF_UNIX;
  memcpy(a->sun_path + 1, name, n < sizeof a->sun_path ? n : sizeof a->sun_path - 1);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

static bool is_held(const char *name, const char *tail)
{
  struct sockaddr_un a;
  socklen_t size = address_of(&a, name, tail);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) die(70, "socket: %s", strerror(errno));
  bool held = !connect(fd, (struct sockaddr *)&a, size) || errno != ECONNREFUSED;
  close(fd);
  return held;
}

static bool take_door(struct gpu *gpu, const char *name, const char *tail)
{
  struct sockaddr_un a;
  socklen_t size = address_of(&a, name, tail);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) die(70, "socket: %s", strerror(errno));
  if (!bind(fd, (struct sockaddr *)&a, size)) {
    shutdown(fd, SHUT_RDWR);
    gpu->doors[gpu->door_count++] = raised(fd);
    return true;
  }
  if (errno != EADDRINUSE) die(70, "bind: %s", strerror(errno));
  close(fd);
  return false;
}

static bool takes_room(const struct entry *e) /* of a claim from this process, of the GPUs that it names */
{
  bool beneath = false;
  for (int k = 0; *e->inside && k < claims.count && !beneath; k++)
    beneath = claims.living[k].uid == e->uid && !*claims.living[k].inside && !strcmp(claims.living[k].token, e->inside);
  bool is_around = *inside && e->uid == geteuid() && !strcmp(e->token, inside);
  bool is_beside = beneath && e->uid == geteuid() && !strcmp(e->inside, inside);
  return !is_mine(&claims, e) && !is_around && (!beneath || is_beside);
}

static bool is_part(int gpu, int name, int part) /* of an entry here that takes room and whose process, unlike a child, keeps it */
{
  for (int i = 0; i < claims.count; i++) {
    const struct entry *e = &claims.living[i];
    if (e->bytes[gpu] && e->part[gpu][name] == part && takes_room(e) && !has_ended(e)) return true;
  }
  return false;
}

static const char *name_of(int i, int name) { return name ? gpus[i].whole : gpus[i].uuid; }

static bool take_part(int i, int name)
{
  char tail[16];
  int *mine = &gpus[i].part[name];
  for (int part = 0; part < PARTS && *mine < 0; part++) {
    put(tail, sizeof tail, ".%d", part);
    if (!is_part(i, name, part) && take_door(&gpus[i], name_of(i, name), tail)) *mine = part;
  }
  return *mine >= 0;
}

static bool parts_are_known(int i, int name)
{
  char tail[16];
  for (int part = 0; part < 2 * PARTS; part++) { /* the second half is of its pieces, and no entry vouches for it */
    bool known = part == gpus[i].part[name] || (part < PARTS && is_part(i, name, part));
    put(tail, sizeof tail, ".%d", part);
    if (!known && is_held(name_of(i, name), tail)) return false;
  }
  return true;
}

static const char *const all_modes[] = {"DPX", "TPX", "QPX", "CPX"};

static bool take_part_of_pieces(struct gpu *gpu) /* before a piece: whoever takes all of the GPU asks for it */
{
  char tail[32];
  for (int part = PARTS; part < 2 * PARTS && gpu->part_of_pieces < 0; part++) {
    put(tail, sizeof tail, ".%d", part);
    if (take_door(gpu, gpu->whole, tail)) gpu->part_of_pieces = part;
  }
  if (gpu->part_of_pieces < 0) return false;
  put(tail, sizeof tail, ".%s.%d", gpu->mode, gpu->part_of_pieces);
  if (*gpu->mode && !take_door(gpu, gpu->whole, tail)) return false;
  if (is_held(gpu->whole, "")) return false;
  for (int part = 0; part < PARTS; part++) {
    put(tail, sizeof tail, ".%d", part);
    if (is_held(gpu->whole, tail)) return false; /* a share of all of it */
  }
  for (size_t mode = 0; mode < sizeof all_modes / sizeof *all_modes && *gpu->mode; mode++)
    for (int part = PARTS; part < 2 * PARTS && strcmp(all_modes[mode], gpu->mode); part++) {
      put(tail, sizeof tail, ".%s.%d", all_modes[mode], part);
      if (is_held(gpu->whole, tail)) return false;
    }
  return true;
}

static void close_doors(struct gpu *gpu)
{
  while (gpu->door_count) close(gpu->doors[--gpu->door_count]);
  gpu->part[0] = gpu->part[1] = gpu->part_of_pieces = -1;
  gpu->parts_here[0] = gpu->parts_here[1] = 0;
}

static bool take_doors_of_name(int i, int name)
{
  struct gpu *gpu = &gpus[i];
  const char *text = name_of(i, name);
  char first[32], last[32];
  int before = gpu->door_count;
  if (*inside) return take_part(i, name) && is_token_held(gpu);
  tails_of_token(token, first, last);
  if (*token && !take_door(gpu, text, first)) return false;
  if (!take_door(gpu, text, "") || !parts_are_known(i, name)) return false;
  if (*token) return take_part(i, name) && take_door(gpu, text, last);
  if (!share) return true;
  for (int part = 0; part < PARTS; part++) gpu->parts_here[name] |= (unsigned)is_part(i, name, part) << part;
  if (!take_part(i, name) || !parts_are_known(i, name)) return false; /* one of the processes may have ended since */
  close(gpu->doors[before]);
  gpu->doors[before] = gpu->doors[--gpu->door_count];
  return true;
}

static bool take_doors(int i)
{
  struct gpu *gpu = &gpus[i];
#ifdef NO_DOORS
  return true;
#endif
  if (without_doors || (*inside && gpu->by_entry)) return true;
#ifndef NO_PART
  if (gpu->is_piece && !take_part_of_pieces(gpu)) return false;
#endif
  return take_doors_of_name(i, 0) && (!has_two_names(gpu) || take_doors_of_name(i, 1));
}

/* ---- closed GPUs ---- */

static void read_closed_file(int dir, const char *name)
{
  static char data[TEXT + 1];
  char uuid[UUID_SIZE], from[32], until[32], whom[256];
  struct stat s, above;
  double begin = seconds(CLOCK_REALTIME), end = begin + (hold_for >= 0 ? hold_for : 86400);
  int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;
  bool counts = !fstat(fd, &s) && S_ISREG(s.st_mode) && !(s.st_mode & 022) && s.st_size <= TEXT;
  counts = counts && (!s.st_uid || (!fstat(dir, &above) && s.st_uid == above.st_uid));
  ssize_t n = counts ? pread(fd, data, TEXT, 0) : 0;
  close(fd);
  data[n < 0 ? 0 : n] = 0;
  for (char *line = data; line && *line; line = strchr(line, '\n'), line += line != NULL) {
    if (sscanf(line, "%100s %31s %31s %255s", uuid, from, until, whom) != 4) continue;
    bool drained = !strcmp(from, "-") && !strcmp(until, "-");
    bool binds = drained || (geteuid() && begin < atof(until) && atof(from) < end && !is_for_me(whom));
    for (int i = 0; i < gpu_count && binds; i++)
      gpus[i].closed = gpus[i].closed || !strcmp(gpus[i].uuid, uuid) || !strcmp(gpus[i].whole, uuid);
  }
}

static void read_closed(void) /* without host.lock: a directory service may be asked */
{
  for (int i = 0; i < gpu_count; i++) gpus[i].closed = false;
  int settings = open("/etc/safe-gpu", O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (settings >= 0) read_closed_file(settings, "closed"), close(settings);
  read_closed_file(state_fd, "closed");
}

/* ---- a claim ---- */

static long long room(int gpu) /* what other claims leave */
{
  long long left = capacity;
#ifdef NO_ROOM
  return left;
#endif
  for (int i = 0; i < claims.count; i++) {
    const struct entry *e = &claims.living[i];
    if (takes_room(e)) left -= e->bytes[gpu] < 0 || e->bytes[gpu] > capacity ? capacity : e->bytes[gpu];
  }
  return left;
}

static bool could_do(int i)
{
  return !gpus[i].closed && !gpus[i].busy && !gpus[i].elsewhere && room(i) >= (share ? share : capacity) &&
         (!*inside || gpus[i].inside);
}

static void release(void)
{
  remove_entry(&claims); /* first: a door that is free must be that of no entry here */
  for (int i = 0; i < gpu_count; i++) {
    close_doors(&gpus[i]);
    gpus[i].chosen = false;
  }
  next_fd = KEPT;
}

static bool take(void) /* the doors of enough GPUs, or nothing */
{
  for (;;) {
    int order[GPUS], count = 0;
    for (int i = 0; i < gpu_count && count < wanted; i++)
      if (could_do(i)) order[count++] = i;
    if (count < wanted) return false;
    for (int i = 1; i < count; i++) /* by UUID */
      for (int k = i; k && strcmp(gpus[order[k - 1]].uuid, gpus[order[k]].uuid) > 0; k--) {
        int other = order[k];
        order[k] = order[k - 1];
        order[k - 1] = other;
      }
    int taken = 0;
    while (taken < count && take_doors(order[taken])) gpus[order[taken++]].chosen = true;
    if (taken == count) return true;
    gpus[order[taken]].elsewhere = true;
    release();
  }
}

/* The nearest waiter that goes first, or NULL; how many there are. */
static const struct entry *ahead(int *count)
{
  const struct entry *nearest = NULL;
  bool counted = queue.mine < 0;
  *count = 0;
  for (int i = 0; i < queue.count; i++) {
    const struct entry *e = &queue.living[i];
    bool competes = false;
    if (is_mine(&queue, e)) {
      counted = true;
      break;
    }
    for (int k = 0; k < gpu_count; k++) competes = competes || (e->bytes[k] && (!*inside || gpus[k].inside));
    if (!competes || strcmp(e->inside, inside)) continue;
    nearest = e;
    ++*count;
  }
#ifdef NO_QUEUE
  return NULL;
#endif
  if (!counted && !nearest && queue.count) nearest = &queue.living[queue.count - 1];
  return nearest;
}

static void find_around(void) /* with the claims listed */
{
  const struct entry *around = claim_around();
  int held = 0;
  for (int i = 0; i < gpu_count; i++) held += gpus[i].inside;
  *inside = 0;
  if (around) put(inside, sizeof inside, "%s", around->token);
  if (around && (held < wanted || share)) die(75, "the enclosing claim has %d of these GPUs, and whole ones", held);
  if (scope && !around) {
    fputs("client: warning: SAFE_GPU_SCOPE is of no living claim of these GPUs, and is ignored\n", stderr);
    scope = NULL;
    remove_entry(&queue); /* it was for GPUs inside */
  }
  for (int i = 0; i < gpu_count; i++) gpus[i].busy = is_busy(i, around), gpus[i].elsewhere = false;
}

static bool has_lost_a_sharer(int i) /* and its part is held again: by another directory, as far as is known */
{
  char tail[16];
  for (int name = 0; name < 2; name++)
    for (int part = 0; part < PARTS; part++) {
      put(tail, sizeof tail, ".%d", part);
      bool was_here = gpus[i].parts_here[name] >> part & 1;
      if (was_here && !is_part(i, name, part) && is_held(name_of(i, name), tail)) return true;
    }
  return false;
}

static bool may_stay(void) /* with host.lock given back */
{
#ifdef ONE_LISTING
  return true;
#endif
  list(&claims);
  remove_dead();
  read_closed();
  if (!is_current() || (scope && !claim_around())) return false;
  for (int i = 0; i < gpu_count; i++) {
    bool may = *inside ? gpus[i].inside : !gpus[i].closed;
    if (gpus[i].chosen && (!may || room(i) < (share ? share : capacity))) return false;
    if (gpus[i].chosen && has_lost_a_sharer(i)) return false;
  }
  return true;
}

static void sleep_on(const char *name, int others)
{
  struct flock lock = whole_file(F_UNLCK);
  int fd = open_entry(queue.fd, name);
  if (fd < 0) return;
  wait_for_lock(fd, others < 32 ? 10 : 60);
  fcntl(fd, F_OFD_SETLK, &lock);
  close(fd);
}

static void watch(void) /* the claims, as the first who waits */
{
  for (double until = now() + 0.1; now() < until && (deadline < 0 || now() < deadline);) {
    int free_gpus = 0;
    nap(0.01, 0.02);
    list(&claims);
    for (int i = 0; i < gpu_count; i++) free_gpus += could_do(i);
    if (free_gpus >= wanted) return;
  }
}

static bool confirmed(void) /* nobody came between the poll and the entry */
{
  bool busy;
  int older = lock_older_package(&busy);
  poll_driver();
  for (int i = 0; i < gpu_count && !busy; i++) busy = gpus[i].chosen && is_busy(i, claim_around());
  close_fd(&older);
  return !busy;
}

static void claim(void)
{
  bool asked_again = false;
  for (;;) {
    open_directories();
    if (queue.mine >= 0 && !same_file(queue.mine, queue.fd, queue.mine_name)) close_fd(&queue.mine);
    if (now() - polled > 0.1) poll_driver();
    read_closed();
    int host = lock_host(), others = 0;
    if (host < 0) continue;
    list(&claims);
    list(&queue);
    cap_tickets();
    if (was_my_ticket_left_out()) remove_entry(&queue);
    find_around();
    for (int i = 0; i < gpu_count; i++) gpus[i].closed = gpus[i].closed && !*inside;
    const struct entry *nearest = ahead(&others);
    bool taken = !nearest && take(), made = taken && make_entry(&claims);
    if (!taken && queue.mine < 0 && (deadline < 0 || now() < deadline)) make_entry(&queue);
    close(host);
    remove_dead();
    if (made && may_stay()) {
      if (confirmed()) return remove_entry(&queue);
      made = taken = false;
    }
    release();
    bool withdrawn = taken, elsewhere = false;
    for (int i = 0; i < gpu_count; i++) elsewhere = elsewhere || gpus[i].elsewhere;
    if (deadline >= 0 && now() >= deadline && !(withdrawn && now() < began + 1)) {
      if (!elsewhere || asked_again) {
        remove_entry(&queue);
        die(75, "%d of these GPUs were not free in time", wanted);
      }
      asked_again = true; /* a dying process closes its descriptors one by one */
      nap(0.005, 0.005);
    } else if (withdrawn) {
      nap(0.0005, 0.01);
    } else if (nearest) {
      sleep_on(nearest->name, others);
      polled = -1e9;
    } else {
      watch();
    }
  }
}

int main(int argc, char **argv)
{
  int option;
  bool has_pieces = false;
  char *listed = NULL;
  began = now();
  while ((option = getopt(argc, argv, "+n:g:m:s:if:t:p:")) != -1) switch (option) {
    case 'n': wanted = atoi(optarg); break;
    case 'g': listed = optarg; break;
    case 'm': capacity = atoll(optarg); break;
    case 's': share = atoll(optarg); break;
    case 'i': strcpy(token, "wanted"); break;
    case 'f': hold_for = atof(optarg); break;
    case 't': deadline = began + atof(optarg); break;
    case 'p': preset = optarg; break;
    default: die(64, "unknown option");
    }
  for (char *uuid = listed ? strtok(listed, ",") : NULL; uuid && gpu_count < GPUS; uuid = strtok(NULL, ",")) {
    if (strlen(uuid) >= UUID_SIZE) die(64, "%s is no UUID", uuid);
    add_gpu(uuid);
    has_pieces = has_pieces || gpus[gpu_count - 1].is_piece;
  }
  if (!argv[optind] || wanted < 1 || wanted > gpu_count || (has_pieces && wanted > 1) || share < 0 || share > capacity || (share && *token))
    die(64, "usage: client -n N -g UUID,... [-m BYTES] [-s BYTES] [-i] [-f SECONDS] [-t SECONDS] [-p PRESET] COMMAND ...");
  prepare(argv[optind]);
  claim();
  become(argv + optind);
}
