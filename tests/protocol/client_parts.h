/* What the client needs beside the protocol, and what only tests need: it is included by client.c, whose declarations
 * stand before it. */

/* ---- Words, numbers, time ---- */

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

static void nap(double least, double most)
{
  unsigned short r;
  if (getrandom(&r, sizeof r, 0) != sizeof r) r = 0;
  double s = least + (most - least) * r / 65535;
  struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
  nanosleep(&t, NULL);
}

static void hexadecimal(char out[17])
{
  unsigned char r[8];
  if (getrandom(r, sizeof r, 0) != sizeof r) die(70, "no random numbers");
  for (int i = 0; i < 8; i++) sprintf(out + 2 * i, "%02x", r[i]);
}

static void close_fd(int *fd)
{
  if (*fd >= 0) close(*fd);
  *fd = -1;
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

/* ---- JSON: a reader that tells note() of each value, and what writes a text ---- */

static const char *at;
static bool bad;

static void blanks(void) { at += strspn(at, " \t\r\n"); }

static void text(char *out, size_t size) /* an escape becomes a question mark: no UUID and no hash has one */
{
  size_t n = 0;
  bad = bad || *at != '"';
  for (at++; !bad && *at != '"'; at++) {
    bool escaped = *at == '\\' && at[1] && *++at != '/';
    bad = !*at;
    if (n + 1 < size) out[n++] = escaped ? '?' : *at;
  }
  out[n] = 0;
  if (!bad) at++;
}

static long long whole_number(const char *word, bool is_text, long long least, long long most) /* -1: it is missing */
{
  if (is_text || !*word || word[strspn(word, "0123456789")] || strlen(word) > 19) return -1;
  unsigned long long number = strtoull(word, NULL, 10);
  return number < (unsigned long long)least || number > (unsigned long long)most ? -1 : (long long)number;
}

static long long number_or_0(const char *word, bool is_text, long long most)
{
  long long number = whole_number(word, is_text, 0, most);
  return number < 0 ? 0 : number;
}

static void note(struct entry *e, const char *above, const char *key, const char *word, bool is_text); /* client.c */

static void value(struct entry *e, const char *above, const char *key, int depth)
{
  char word[256] = "", close = *at == '{' ? '}' : ']';
  if (depth > 20) {
    bad = true;
  } else if (*at == '{' || *at == '[') {
    bool is_empty = at[1 + strspn(at + 1, " \t\r\n")] == close;
    if (!strcmp(above, "gpus")) note(e, above, key, "", false); /* all of it */
    if (!strcmp(above, "pieces")) note(e, above, key, close == '}' || is_empty ? "none" : "", false);
    for (at++, blanks(); !bad && *at != close; blanks()) {
      char name[256] = "";
      if (close == '}') {
        text(name, sizeof name);
        blanks();
        bad = bad || *at != ':';
        if (!bad) at++, blanks();
      }
      if (!bad) value(e, depth == 1 ? key : depth ? "?" : "", name, depth + 1);
      blanks();
      if (!bad && *at == ',') at++;
      else bad = bad || *at != close;
    }
    if (!bad) at++;
  } else if (*at == '"') {
    text(word, sizeof word);
    if (!bad) note(e, above, key, word, true);
  } else {
    size_t n = strspn(at, "-+.0123456789eEaflnrstuINity");
    bad = !n || n >= sizeof word;
    if (bad) return;
    memcpy(word, at, n);
    at += n;
    note(e, above, key, word, false);
  }
}

static void write_text(FILE *out, const char *s) /* what is not printable ASCII becomes a question mark */
{
  fputc('"', out);
  for (; *s; s++) fputc(*s < ' ' || *s > '~' || *s == '"' || *s == '\\' ? '?' : *s, out);
  fputc('"', out);
}

/* ---- Processes ---- */

static long long pid_namespace(void) /* 0: not known */
{
  struct stat s;
  return stat("/proc/self/ns/pid", &s) ? 0 : (long long)s.st_ino;
}

static bool read_process(long long pid, char *state, long long *start) /* false: it is not seen */
{
  char path[64], line[4096] = "";
  put(path, sizeof path, "/proc/%lld/stat", pid);
  FILE *file = fopen(path, "re");
  char *p = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
  if (file) fclose(file);
  return p && sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lld", state,
                     start) == 2;
}

static bool has_ended(const struct entry *e) /* the process that made it, as far as can be seen from here */
{
  char state;
  long long start;
  if (!e->pid || e->pidns != pid_namespace()) return false;
  if (read_process(e->pid, &state, &start)) return state == 'Z' || state == 'X' || start != e->start;
  return kill((pid_t)e->pid, 0) && errno == ESRCH;
}

/* ---- What a neighbour may make: bounds by owner, values and file systems ---- */

static bool is_local(int fd)
{
  static const unsigned long remote[] = {0x6969,     0xff534d42, 0xfe534d42, 0x517b,     0x0bd00bd0,
                                         0x00c36400, 0x5346414f, 0x01021997, 0x47504653, 0x19830326};
  struct statfs s;
  if (fstatfs(fd, &s)) return false;
  for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
    if (((unsigned long)s.f_type & 0xffffffff) == remote[i]) return false;
  return true;
}

static bool is_nobody(uid_t uid) /* all whom this user namespace does not know */
{
  unsigned long inside = 1, outside = 1, length = 0;
  FILE *file = fopen("/proc/self/uid_map", "re");
  if (!file) return false;
  if (fscanf(file, "%lu %lu %lu", &inside, &outside, &length) != 3) inside = outside = length = 0;
  fclose(file);
  return uid == 65534 && (inside || outside || length != 4294967295UL);
}

static bool has_too_many_values(const char *data)
{
  int values = 0;
  for (; *data; data++) values += *data == ',' || *data == '[' || *data == '{';
  return values > VALUES;
}

struct owner { /* of files in a directory */
  uid_t uid;
  bool is_bounded, is_over;
  int files;
  long long bytes;
};

static struct owner *owner_of(uid_t uid, struct owner **owners, int *count)
{
  for (int i = 0; i < *count; i++)
    if ((*owners)[i].uid == uid) return &(*owners)[i];
  if (!(*owners = realloc(*owners, (size_t)(*count + 1) * sizeof **owners))) die(70, "no memory");
  (*owners)[*count] = (struct owner){.uid = uid, .is_bounded = uid && !is_nobody(uid)};
  return &(*owners)[(*count)++];
}

/* ---- Claims inside claims ---- */

static bool is_held(const char *name, const char *tail); /* client.c */

static void tails_of_token(const char *of, char first[32], char last[32])
{
  char both[64], hash[17];
  put(both, sizeof both, "%s.door", of);
  hash16(both, hash);
  put(first, 32, ".%s.0", hash);
  put(last, 32, ".%s.1", hash);
}

static bool is_token_held(const struct gpu *gpu)
{
  char first[32], last[32];
  tails_of_token(scope, first, last);
  return is_held(gpu->uuid, first) && is_held(gpu->uuid, last);
}

static const struct entry *claim_around(void)
{
  char hash[17];
  for (int i = 0; i < gpu_count; i++) gpus[i].inside = false;
  if (!scope) return NULL;
  hash16(scope, hash);
  for (int i = 0; i < claims.count; i++) {
    const struct entry *e = &claims.living[i];
    if (e->uid != geteuid() || *e->inside || strcmp(e->token, hash)) continue;
    int held = 0;
    for (int k = 0; k < gpu_count; k++) {
      gpus[k].by_entry = without_doors || e->part[k][0] < 0;
      gpus[k].inside = e->bytes[k] < 0 && (gpus[k].by_entry || (!has_ended(e) && is_token_held(&gpus[k])));
      held += gpus[k].inside;
    }
    return held ? e : NULL;
  }
  return NULL;
}

/* ---- The driver of a simulated host ---- */

static struct {
  char uuid[UUID_SIZE];
  long pid;
} on_gpu[1024];
static int on_gpu_count;
static double polled = -1e9;

/* Whether a device of a simulated host is there, by the file that says how its card is divided: "whole", "mig ...",
 * "partitions N" or "functions N". Without one the card is whole. */
static bool is_there(const struct gpu *gpu)
{
  char path[4400], line[256] = "whole";
  const char *mode = "";
  put(path, sizeof path, "%.4000s/%.100s/%.100s.mode", simulated, preset ? preset : "", gpu->whole);
  FILE *file = preset ? fopen(path, "re") : NULL;
  if (file && !fgets(line, sizeof line, file)) *line = 0;
  if (file) fclose(file);
  if (!strncmp(line, "functions", 9)) return true;
  if (!strncmp(line, "partitions 2", 12)) mode = "DPX";
  if (!strncmp(line, "partitions 4", 12)) mode = "QPX";
  if (!strncmp(line, "partitions 8", 12)) mode = "CPX";
  return !preset || (gpu->is_piece == !!strncmp(line, "whole", 5) && !strcmp(gpu->mode, mode));
}

static void poll_driver(void)
{
  char path[4200];
  polled = now();
  on_gpu_count = 0;
  for (int i = 0; i < gpu_count; i++) gpus[i].there = is_there(&gpus[i]);
  if (!preset) return;
  put(path, sizeof path, "%.4000s/%.100s", simulated, preset);
  DIR *d = opendir(path);
  for (struct dirent *one; d && (one = readdir(d));) {
    long pid;
    char *dot = strchr(one->d_name, '.');
    if (!dot || dot == one->d_name || dot - one->d_name >= UUID_SIZE) continue;
    if (strstr(one->d_name, "-graphics-") || sscanf(dot, ".%ld-", &pid) != 1) continue;
    int fd = openat(dirfd(d), one->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_SH | LOCK_NB) && on_gpu_count < 1024) {
      put(on_gpu[on_gpu_count].uuid, UUID_SIZE, "%.*s", (int)(dot - one->d_name), one->d_name);
      on_gpu[on_gpu_count++].pid = pid;
    }
    close(fd);
  }
  if (d) closedir(d);
}

static bool is_of_sharer(int gpu, long pid)
{
  char path[64];
  struct stat s;
  put(path, sizeof path, "/proc/%ld", pid);
  for (int i = 0; share && !stat(path, &s) && i < claims.count; i++)
    if (claims.living[i].bytes[gpu] > 0 && claims.living[i].uid == s.st_uid) return true;
  return false;
}

static bool is_busy(int gpu, const struct entry *around)
{
  if (!gpus[gpu].there) return true;
  for (int i = 0; i < on_gpu_count; i++) {
    long pid = on_gpu[i].pid;
    if (strcmp(on_gpu[i].uuid, gpus[gpu].uuid) || pid == getpid() || (around && pid == around->pid)) continue;
    if (!is_of_sharer(gpu, pid)) return true;
  }
  return false;
}

/* ---- Whom a reservation is for ---- */

static bool is_for_me(const char *whom)
{
  struct passwd *user = getpwuid(geteuid());
  gid_t groups[1024];
  int count = getgroups(1024, groups);
  if (!strncmp(whom, "user:", 5)) return user && !strcmp(whom + 5, user->pw_name);
  for (int i = -1; !strncmp(whom, "group:", 6) && i < count; i++) {
    struct group *group = getgrgid(i < 0 ? getegid() : groups[i]);
    if (group && !strcmp(whom + 6, group->gr_name)) return true;
  }
  return false;
}

/* ---- The lock of the older package ---- */

static void release(void); /* client.c */

static struct flock whole_file(short type) { return (struct flock){.l_type = type, .l_whence = SEEK_SET}; }

static void on_alarm(int signal) { (void)signal; }

static void alarm_after(double s) /* and again, in case it fell between two calls */
{
  struct itimerval timer = {{0, 20000}, {(time_t)s, (suseconds_t)((s - (double)(time_t)s) * 1e6)}};
  if (s <= 0) timer.it_interval = timer.it_value = (struct timeval){0, 0};
  setitimer(ITIMER_REAL, &timer, NULL);
}

static bool wait_for_lock(int fd, double longest) /* a read lock */
{
  struct flock lock = whole_file(F_RDLCK);
  double until = now() + longest;
  int failed;
  if (deadline >= 0 && deadline < until) until = deadline;
  alarm_after(until > now() ? until - now() : 0.001);
  while ((failed = fcntl(fd, F_OFD_SETLKW, &lock)) && errno == EINTR && now() < until) {}
  alarm_after(0);
  return !failed;
}

static int lock_older_package(bool *busy) /* shared; -1: there is none */
{
  const char *mode = getenv("SAFE_GPU_LEGACY_LOCK");
  struct flock lock = whole_file(F_RDLCK);
  *busy = false;
  if (mode && !strcmp(mode, "never")) return -1;
  int fd = open("/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users",
                O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return -1;
  *busy = fcntl(fd, F_OFD_SETLK, &lock) != 0;
  if (*busy) release(), wait_for_lock(fd, 1e6);
  return fd;
}

/* ---- The command line, and the command that holds the claim ---- */

static _Noreturn void become(char **argv)
{
  char visible[GPUS * UUID_SIZE] = "", bytes[32];
  fcntl(claims.mine, F_SETFD, 0);
  for (int i = 0; i < gpu_count; i++) {
    if (!gpus[i].chosen) continue;
    if (*visible) strcat(visible, ",");
    strcat(visible, gpus[i].uuid);
    for (int k = 0; k < gpus[i].door_count; k++) fcntl(gpus[i].doors[k], F_SETFD, 0);
  }
  setenv("CUDA_VISIBLE_DEVICES", visible, 1);
  put(bytes, sizeof bytes, "%lld", share);
  if (share) setenv("SAFE_GPU_SHARE", bytes, 1);
  if (*token && !*inside) setenv("SAFE_GPU_SCOPE", token, 1);
  else if (!*inside) unsetenv("SAFE_GPU_SCOPE");
  signal(SIGALRM, SIG_DFL);
  execvp(argv[0], argv);
  die(70, "%s: %s", argv[0], strerror(errno));
}

static void copy_path(char out[4096], const char *path) /* without slashes at its end; other spellings are refused */
{
  size_t n = strlen(path);
  if (*path != '/' || n > 4000) die(70, "%s is not an absolute path", path);
  strcpy(out, path);
  while (n > 1 && out[n - 1] == '/') out[--n] = 0;
  if (strstr(out, "//") || strstr(out, "/./") || strstr(out, "/../")) die(70, "%s can be written more simply", path);
}

static void prepare(const char *program)
{
  const char *given = getenv("SAFE_GPU_DIR"), *hosts = getenv("SAFE_GPU_SIMULATED_DIR"), *slash = strrchr(program, '/');
  struct sigaction action = {.sa_handler = on_alarm}; /* without SA_RESTART: a sleep ends */
  char hash[17];
  sigaction(SIGALRM, &action, NULL);
  put(command, sizeof command, "%.200s", slash ? slash + 1 : program);
  copy_path(state_path, given && *given ? given : "/tmp/safe-gpu");
  if (hosts && *hosts) copy_path(simulated, hosts);
  else put(simulated, sizeof simulated, "%.4000s/simulated", state_path);
  hash16(simulated, hash);
  if (preset) put(door_prefix, sizeof door_prefix, "sim-%s/", hash);
  scope = getenv("SAFE_GPU_SCOPE");
  if (scope && !*scope) scope = NULL;
  if (*token) hexadecimal(token), hash16(token, token_hash);
  int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  without_doors = fd < 0 && errno != EMFILE && errno != ENFILE;
  if (without_doors) fputs("client: warning: no sockets, so the claim holds by its file alone\n", stderr);
  close_fd(&fd);
}

static void add_gpu(const char *text) /* UUID, UUID=GPU, UUID@GPU or UUID@GPU+MODE */
{
  struct gpu *gpu = &gpus[gpu_count++];
  const char *end = text + strcspn(text, "@="), *mode = strchr(end, '+');
  gpu->part[0] = gpu->part[1] = gpu->part_of_pieces = -1;
  gpu->is_piece = *end == '@';
  put(gpu->uuid, UUID_SIZE, "%.*s", (int)(end - text), text);
  if (*end && mode) put(gpu->whole, UUID_SIZE, "%.*s", (int)(mode - end - 1), end + 1);
  else put(gpu->whole, UUID_SIZE, "%s", *end ? end + 1 : gpu->uuid);
  put(gpu->mode, MODE_SIZE, "%s", *end && mode ? mode + 1 : "");
}
