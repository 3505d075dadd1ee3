/* Two sections of safe_gpu/coordination/PROTOCOL.md, Files and Entries, for client.c, whose declarations stand before
 * it: the state directory, host.lock, and entries made, listed, read and removed. */

enum { NAME_SIZE = 40, LOWEST_FD = 500 };

enum { /* What is at most */
  ENTRY_BYTES = 32 << 10,
  ENTRY_VALUES = 2048,
  ENTRY_GPUS = 256,
  FILES_OF_OWNER = 2048,
  BYTES_OF_OWNER = 4 << 20,
  TICKETS_OF_OWNER = 1000,
  CLOSED_BYTES = 64 << 10,
  LARGEST_GAP = 10000000 /* between two numbers that count */
};

struct entry { /* of a living claim, or of a waiter */
  char name[NAME_SIZE];
  uid_t owner;
  long long number, pid, start, pidns, nb_gpus;
  char token[17], inside[17];
  double turn;                /* -1: none */
  long long taken[MOST_GPUS]; /* bytes that it takes or wants of each of our GPUs; 0: it is not in our way there */
  int part[MOST_GPUS][2];     /* by each name of our GPU; -1: none */
};

struct directory {
  const char *name;
  int fd;
  struct entry *living;    /* by age */
  char (*dead)[NAME_SIZE]; /* that this user may remove */
  int living_count, dead_count;
  long long highest; /* of the numbers that count */
  bool is_full;      /* no more files of this user would count */
  int own;           /* our entry in it; -1: none */
  char own_name[NAME_SIZE];
};

static char state_parent[4096], state_name[256], command[201], host[201];
static int state_fd = -1, next_fd = LOWEST_FD; /* next_fd: for what COMMAND keeps */
static struct directory claims = {.name = "claims", .fd = -1, .own = -1};
static struct directory queue = {.name = "queue", .fd = -1, .own = -1};

/* ---- Files ---- */

static void make_directory(int parent, const char *name)
{
  char temporary[NAME_SIZE];
  hidden_name(temporary);
  if (mkdirat(parent, temporary, 0700)) return;
  int fd = openat(parent, temporary, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0 || fchmod(fd, 01777) || renameat2(parent, temporary, parent, name, RENAME_NOREPLACE))
    unlinkat(parent, temporary, AT_REMOVEDIR); /* somebody else has made it */
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

static bool open_directories(void) /* false: somebody is removing them */
{
  int parent = open(state_parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (parent < 0) die(70, "%s: %s", state_parent, strerror(errno));
  close_fd(&state_fd);
  close_fd(&claims.fd);
  close_fd(&queue.fd);
  state_fd = open_directory(parent, state_name);
  close(parent);
  if (state_fd < 0) return false;
  flock(state_fd, LOCK_SH | LOCK_NB); /* if it can be had at once: systemd-tmpfiles skips the directory */
  claims.fd = open_directory(state_fd, "claims");
  queue.fd = open_directory(state_fd, "queue");
  return claims.fd >= 0 && queue.fd >= 0;
}

static bool directories_are_current(void)
{
  char path[4400];
  put(path, sizeof path, "%s/%s", state_parent, state_name);
  return same_file(state_fd, AT_FDCWD, path) && same_file(claims.fd, state_fd, "claims") &&
         same_file(queue.fd, state_fd, "queue");
}

static bool make_host_lock(void) /* false: the directory was removed */
{
  char temporary[NAME_SIZE];
  hidden_name(temporary);
  int fd = openat(state_fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0 && errno == ENOENT) return false;
  if (fd < 0 || fchmod(fd, 0666)) die(70, "host.lock cannot be made: %s", strerror(errno));
  linkat(state_fd, temporary, state_fd, "host.lock", 0); /* unless somebody else has made it */
  unlinkat(state_fd, temporary, 0);
  close(fd);
  return true;
}

static int lock_host(void) /* -1: the directory was removed */
{
  for (double since = now();;) {
    int fd = openat(state_fd, "host.lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno != ENOENT) die(70, "host.lock cannot be opened: %s", strerror(errno));
    if (fd < 0 && !make_host_lock()) return -1;
    while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB)) {
      double waited = now() - since;
      if (waited > 10 && now() >= deadline) die(70, "host.lock is held for %.0f s", waited);
      nap(0.001, waited < 0.1 ? 0.005 : 0.1);
    }
    if (fd >= 0 && same_file(fd, state_fd, "host.lock")) return fd;
    close_fd(&fd); /* it was just made, or somebody has removed its name */
  }
}

/* ---- Entries: what they say ---- */

static bool parse_entry(struct entry *e, const char *said) /* false: it counts for nothing */
{
  int values = 0;
  for (const char *p = said; *p; p++) values += *p == ',' || *p == '[' || *p == '{';
  said = skip_blanks(said);
  if (values > ENTRY_VALUES || *said != '{' || !end_of(said)) return false;
  const char *named = find(said, "gpus");
  if (count_members(named) > ENTRY_GPUS || count_members(find(said, "pieces")) > ENTRY_GPUS) return false;
  e->pid = whole_number(find(said, "pid"), 0, 1LL << 62, 0);
  e->start = whole_number(find(said, "start"), 0, 1LL << 62, 0);
  e->pidns = whole_number(find(said, "pidns"), 0, 1LL << 62, 0);
  e->nb_gpus = whole_number(find(said, "nb_gpus"), 0, ENTRY_GPUS, 0);
  bool is_object = named && *named == '{', is_list = named && *named == '[';
  if (!is_object && !(is_list && e->nb_gpus)) return false;
  e->turn = number_or(-1, find(said, "turn"), 1024.0 * (double)e->number);
  copy_text(e->token, sizeof e->token, find(said, "token"));
  copy_text(e->inside, sizeof e->inside, find(said, "inside"));
  for (int i = 0; i < gpu_count; i++) {
    e->taken[i] = taken_of(&gpus[i], said);
    for (int name = 0; name < 2; name++) /* higher parts are of pieces: no entry vouches for them */
      e->part[i][name] = (int)whole_number(find(find(said, "parts"), name_of(&gpus[i], name)), 0, PARTS - 1, -1);
  }
  return true;
}

static char text[ENTRY_BYTES]; /* of the entry that is being made */

static void add(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + strlen(text), sizeof text - strlen(text), format, arguments);
  va_end(arguments);
}

static const char *comma(void) /* what stands before the next member of an object or a list */
{
  bool is_first = strchr("{[", text[strlen(text) - 1]);
  return is_first ? "" : ",";
}

static void add_time(const char *key, double when) /* below 0: not known */
{
  if (when < 0) add(",\"%s\":null", key);
  else add(",\"%s\":%.3f", key, when);
}

static bool is_said(const struct gpu *gpu, bool in_ticket) /* a ticket lists all that could do */
{
  return in_ticket || gpu->is_chosen;
}

static void add_gpus(bool in_ticket)
{
  add(in_ticket ? ",\"gpus\":[" : ",\"gpus\":{");
  for (const struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    if (!is_said(gpu, in_ticket)) continue;
    add("%s\"%s\"", comma(), gpu->uuid);
    if (!in_ticket && share) add(":%lld", share);
    if (!in_ticket && !share) add(":null");
  }
  add(in_ticket ? "]" : "}");
}

static void add_parts(void)
{
  add(",\"parts\":{");
  for (const struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    if (gpu->part[0] >= 0) add("%s\"%s\":%d", comma(), gpu->uuid, gpu->part[0]);
    if (gpu->part[1] >= 0) add("%s\"%s\":%d", comma(), gpu->whole, gpu->part[1]);
    if (gpu->part_of_pieces >= 0) add("%s\"%s\":%d", comma(), gpu->whole, gpu->part_of_pieces);
  }
  add("}");
}

static void add_pieces(bool in_ticket) /* those of a GPU stand together; the list of a second name is empty */
{
  const char *whole = "";
  add(",\"pieces\":{");
  for (const struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    if (!is_said(gpu, in_ticket) || (!gpu->is_piece && !has_two_names(gpu))) continue;
    if (strcmp(gpu->whole, whole)) add("%s\"%s\":[", *whole ? "]," : "", gpu->whole);
    if (gpu->is_piece) add("%s\"%s\"", comma(), gpu->uuid);
    whole = gpu->whole;
  }
  add(*whole ? "]}" : "}");
}

static void add_modes(bool in_ticket)
{
  const char *whole = "";
  add(",\"modes\":{");
  for (const struct gpu *gpu = gpus; gpu < gpus + gpu_count; gpu++) {
    if (!is_said(gpu, in_ticket) || !*gpu->mode || !strcmp(gpu->whole, whole)) continue;
    add("%s\"%s\":\"%s\"", comma(), gpu->whole, gpu->mode);
    whole = gpu->whole;
  }
  add("}");
}

static void write_text_of_entry(bool in_ticket)
{
  static double queued = -1;
  double since = seconds(CLOCK_REALTIME);
  if (in_ticket) queued = since;
  *text = 0;
  add("{\"v\":1,\"pid\":%d,\"start\":%lld,\"pidns\":%lld", (int)getpid(), start_of_process(getpid()), pid_namespace());
  add(",\"host\":\"%s\",\"command\":\"%s\",\"token\":\"%s\",\"inside\":\"%s\"", host, command, token_hash, inside);
  add_time("since", since);
  add_time("queued", queued);
  add_gpus(in_ticket);
  add_pieces(in_ticket);
  add_modes(in_ticket);
  if (in_ticket) {
    add(",\"nb_gpus\":%d", wanted);
    if (share) add(",\"share\":%lld", share);
    add_time("hold_for", hold_for);
  } else {
    add_parts();
    add_time("until", hold_for < 0 ? -1 : since + hold_for);
    add_time("waited", now() - began);
  }
  add("}\n");
}

/* ---- Entries: made whole, removed ---- */

/* Above all descriptors before it, as doors must be, and where the redirections of a shell do not reach. */
static int raised(int fd)
{
  int high = fcntl(fd, F_DUPFD_CLOEXEC, next_fd);
  if (high < 0) die(70, "no descriptors: %s", strerror(errno));
  close(fd);
  next_fd = high + 1;
  return high;
}

static bool make_entry(struct directory *d) /* false: it was removed, or dead ones are in its way */
{
  char temporary[NAME_SIZE], random[17];
  struct flock lock = whole_file(F_WRLCK);
  if (d->is_full && d->dead_count) return false;
  if (d->is_full) die(70, "%s has as many files of yours as count", d->name);
  hidden_name(temporary);
  write_text_of_entry(d == &queue);
  int fd = openat(d->fd, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600); /* 1 */
  if (fd < 0 && errno == ENOENT) return false;
  if (fd < 0) die(70, "no entry can be made in %s: %s", d->name, strerror(errno));
  bool is_written = write(fd, text, strlen(text)) == (ssize_t)strlen(text); /* 2 */
  bool is_locked = is_written && !fcntl(fd, F_OFD_SETLK, &lock);            /* 3 */
  if (!is_locked || fchmod(fd, 0644)) {                                     /* 4 */
    int error = errno;
    unlinkat(d->fd, temporary, 0);
    die(70, "no entry can be made in %s: %s", d->name, strerror(error));
  }
  random_digits(random);
  put(d->own_name, NAME_SIZE, "%lld.%s", d->highest + 1, random);
  renameat(d->fd, temporary, d->fd, d->own_name); /* 5 */
  d->own = raised(fd);
  if (same_file(d->own, d->fd, d->own_name)) return true; /* 6 */
  close_fd(&d->own);
  return false;
}

static void remove_entry(struct directory *d)
{
  struct flock unlock = whole_file(F_UNLCK);
  if (d->own < 0) return;
  if (same_file(d->own, d->fd, d->own_name)) unlinkat(d->fd, d->own_name, 0);
  fcntl(d->own, F_OFD_SETLK, &unlock); /* a child that was forked meanwhile may have a copy */
  close_fd(&d->own);
}

static void remove_dead(struct directory *d) /* when host.lock has been given back */
{
  while (d->dead_count) unlinkat(d->fd, d->dead[--d->dead_count], 0);
}

/* ---- Entries: which ones count ---- */

static struct owner { /* of files in the directory that is being listed */
  uid_t uid;
  bool is_bounded, is_over;
  int files, tickets;
  long long bytes;
} *owners;

static struct known { /* a file that was opened and has several names */
  char name[NAME_SIZE];
  struct stat file;
} *known;

static int owner_count, known_count;

static struct owner *owner_of(uid_t uid)
{
  for (int i = 0; i < owner_count; i++)
    if (owners[i].uid == uid) return &owners[i];
  owners = with_room(owners, owner_count, sizeof *owners);
  owners[owner_count] = (struct owner){.uid = uid, .is_bounded = uid && !is_nobody(uid)};
  return &owners[owner_count++];
}

static bool may_be_entry(const struct stat *file)
{
  return S_ISREG(file->st_mode) && !(file->st_mode & 022) && file->st_size <= ENTRY_BYTES;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_uid == b->st_uid && a->st_size == b->st_size;
}

static bool is_second_name(const struct directory *d, const struct stat *file)
{
  struct stat s; /* the first must be there still: an inode number that is free comes again */
  for (int i = 0; i < known_count; i++)
    if (is_same(&known[i].file, file))
      return !fstatat(d->fd, known[i].name, &s, AT_SYMLINK_NOFOLLOW) && is_same(&known[i].file, &s);
  return false;
}

static void note_known(const char *name, const struct stat *file)
{
  if (file->st_nlink < 2 || is_nobody(file->st_uid)) return; /* of nobody's files each name is a file of its own */
  known = with_room(known, known_count, sizeof *known);
  known[known_count].file = *file;
  put(known[known_count++].name, NAME_SIZE, "%s", name);
}

/* ---- Entries: read ---- */

static int open_entry(const struct directory *d, const char *name) /* -1: it counts for nothing */
{
  static const int by_its_owner[] = {ENOENT, ELOOP, EACCES, EPERM, ENXIO, EWOULDBLOCK};
  int fd = openat(d->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd >= 0) return fd;
  for (size_t i = 0; i < sizeof by_its_owner / sizeof *by_its_owner; i++)
    if (errno == by_its_owner[i]) return -1;
  die(70, "%s: %s", name, strerror(errno)); /* with a claim left out, two could hold one GPU */
}

static bool lives(int fd)
{
  struct flock lock = whole_file(F_WRLCK);
  if (fcntl(fd, F_OFD_GETLK, &lock)) die(70, "F_OFD_GETLK: %s", strerror(errno));
  return lock.l_type == F_WRLCK && !lock.l_start && !lock.l_len;
}

static void note_dead(struct directory *d, const char *name, uid_t owner)
{
  if (geteuid() && geteuid() != owner) return;
  d->dead = with_room(d->dead, d->dead_count, NAME_SIZE);
  put(d->dead[d->dead_count++], NAME_SIZE, "%s", name);
}

static void read_entry(struct directory *d, const char *name, int fd, struct owner *owner)
{
  static char said[ENTRY_BYTES + 1];
  struct entry e = {.number = atoll(name), .owner = owner->uid};
  ssize_t size = pread(fd, said, ENTRY_BYTES, 0);
  said[size < 0 ? 0 : size] = 0;
  put(e.name, NAME_SIZE, "%s", name);
  if (!parse_entry(&e, said) || (d == &queue) != (e.nb_gpus > 0)) return;
  if (d == &queue && e.owner && ++owner->tickets > TICKETS_OF_OWNER) return;
  d->living = with_room(d->living, d->living_count, sizeof e);
  d->living[d->living_count++] = e;
}

static void look_at(struct directory *d, const char *name)
{
  struct stat file, opened;
  if (fstatat(d->fd, name, &file, AT_SYMLINK_NOFOLLOW)) return;
  if (*name == '.' && time(NULL) - file.st_mtime > 60) note_dead(d, name, file.st_uid); /* it was never finished */
  if (*name == '.' || !may_be_entry(&file)) return;
  struct owner *owner = owner_of(file.st_uid);
  if (owner->is_over || is_second_name(d, &file)) return;
  owner->files++;
  owner->bytes += file.st_size;
  owner->is_over = owner->is_bounded && (owner->files > FILES_OF_OWNER || owner->bytes > BYTES_OF_OWNER);
  int fd = owner->is_over ? -1 : open_entry(d, name);
  if (fd < 0) return;
  if (fstat(fd, &opened)) die(70, "fstat: %s", strerror(errno));
  if (is_same(&file, &opened)) { /* else it is another file by now, which the next listing reads */
    note_known(name, &file);
    if (!lives(fd)) note_dead(d, name, file.st_uid);
    else if (may_be_entry(&opened)) read_entry(d, name, fd, owner);
  }
  close(fd);
}

static int is_listed(const struct dirent *one) /* N.RANDOM, or the .RANDOM of what is being made */
{
  const char *name = one->d_name;
  size_t digits = strspn(name, "0123456789");
  bool is_number = digits <= 18 && (*name != '0' || digits == 1);
  return is_number && name[digits] == '.' && is_16_digits(name + digits + 1);
}

static int by_age(const struct dirent **a, const struct dirent **b)
{
  long long x = atoll((*a)->d_name), y = atoll((*b)->d_name);
  if (x != y) return x < y ? -1 : 1;
  return strcmp((*a)->d_name, (*b)->d_name);
}

static void list(struct directory *d)
{
  struct dirent **names;
  int count = scandirat(d->fd, ".", &names, is_listed, by_age); /* it opens a descriptor for this listing */
  if (count < 0) die(70, "%s cannot be listed: %s", d->name, strerror(errno));
  d->living_count = d->dead_count = owner_count = known_count = 0;
  d->highest = 0;
  for (int i = 0; i < count; i++) {
    long long number = atoll(names[i]->d_name);
    if (number - d->highest <= LARGEST_GAP) d->highest = number;
    look_at(d, names[i]->d_name);
    free(names[i]);
  }
  free(names);
  struct owner *own = owner_of(geteuid());
  d->is_full = own->is_bounded && (own->files >= FILES_OF_OWNER || own->bytes + ENTRY_BYTES > BYTES_OF_OWNER);
}

static bool has_ended(const struct entry *e) /* its process, as far as can be seen from here: a child may keep it */
{
  return e->pid && e->pidns == pid_namespace() && process_has_ended(e->pid, e->start);
}

