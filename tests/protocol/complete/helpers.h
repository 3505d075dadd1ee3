/* What the client needs and has no protocol in it: words, time, JSON, processes, users, file systems, locks. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <math.h>
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

static void put_printable(char *out, size_t size, const char *text) /* and as it may stand in a text of JSON */
{
  put(out, size, "%s", text);
  for (; *out; out++)
    if (*out < ' ' || *out > '~' || *out == '"' || *out == '\\') *out = '?';
}

static double seconds(clockid_t clock)
{
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double now(void) { return seconds(CLOCK_MONOTONIC); }

static double earlier(double a, double b) { return a < b ? a : b; }

static double later(double a, double b) { return a > b ? a : b; }

static void nap(double least, double most) /* a random time, so that two do not keep step */
{
  unsigned short r;
  if (getrandom(&r, sizeof r, 0) != sizeof r) r = 0;
  double s = least + (most - least) * r / 65535;
  struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
  nanosleep(&t, NULL);
}

static void random_digits(char out[17]) /* 16 hexadecimal ones */
{
  unsigned char r[8];
  if (getrandom(r, sizeof r, 0) != sizeof r) die(70, "no random numbers");
  for (int i = 0; i < 8; i++) sprintf(out + 2 * i, "%02x", r[i]);
}

static bool is_16_digits(const char *text) { return strspn(text, "0123456789abcdef") == 16 && !text[16]; }

static void hidden_name(char out[18])
{
  *out = '.';
  random_digits(out + 1);
}

static void close_fd(int *fd)
{
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

static void *with_room(void *array, int count, size_t size) /* for one more; to be called for each that is added */
{
  bool is_full = (count & (count - 1)) == 0; /* at 0, 1, 2, 4, 8 and so on */
  if (is_full) array = realloc(array, (2 * (size_t)count + 1) * size);
  if (!array) die(70, "no memory");
  return array;
}

/* ---- JSON: a value is a place in the text, and NULL if it is not there. What end_of() has found may be asked. ---- */

static const char *skip_blanks(const char *p) { return p + strspn(p, " \t\r\n"); }

static const char *end_of_text(const char *p)
{
  if (*p != '"') return NULL;
  for (p++; *p && *p != '"'; p++)
    if (*p == '\\' && p[1]) p++;
  return *p ? p + 1 : NULL;
}

/* What stands behind a value; NULL: this is none. Some broken numbers and constants count as values, too. */
static const char *end_of(const char *p)
{
  if (*p == '"') return end_of_text(p);
  if (*p != '{' && *p != '[') {
    size_t length = strspn(p, "-+.0123456789eEaflnrstuINity");
    return length ? p + length : NULL;
  }
  bool is_object = *p == '{';
  char last = is_object ? '}' : ']';
  for (p = skip_blanks(p + 1); *p != last;) {
    if (is_object) { /* "key": */
      p = end_of_text(p);
      if (!p) return NULL;
      p = skip_blanks(p);
      if (*p != ':') return NULL;
      p = skip_blanks(p + 1);
    }
    p = end_of(p);
    if (!p) return NULL;
    p = skip_blanks(p);
    if (*p == ',') p = skip_blanks(p + 1);
    else if (*p != last) return NULL;
  }
  return p + 1;
}

static const char *first_member(const char *of) /* the first key of an object, the first value of a list */
{
  if (!of || (*of != '{' && *of != '[')) return NULL;
  const char *p = skip_blanks(of + 1);
  return *p == '}' || *p == ']' ? NULL : p;
}

static const char *value_of(const char *member) /* behind its key; in a list the member itself */
{
  const char *p = skip_blanks(end_of(member));
  return *p == ':' ? skip_blanks(p + 1) : member;
}

static const char *next_member(const char *member)
{
  const char *p = skip_blanks(end_of(value_of(member)));
  if (*p == ',') p = skip_blanks(p + 1);
  return *p == '}' || *p == ']' ? NULL : p;
}

static int count_members(const char *of)
{
  int count = 0;
  for (const char *member = first_member(of); member; member = next_member(member)) count++;
  return count;
}

static char unescaped(const char **p) /* what stands behind a backslash; '?' unless it is printable ASCII */
{
  unsigned code = '?';
  char digits[5] = "";
  ++*p;
  if (**p == '"' || **p == '\\' || **p == '/') code = (unsigned char)**p;
  if (**p == 'u') {
    memcpy(digits, *p + 1, strspn(*p + 1, "0123456789abcdefABCDEF") < 4 ? 0 : 4);
    code = (unsigned)strtoul(digits, NULL, 16);
    *p += strlen(digits);
  }
  return code < ' ' || code > '~' ? '?' : (char)code;
}

static void copy_text(char *out, size_t size, const char *value) /* cut where there is no room; "": it is no text */
{
  size_t n = 0;
  *out = 0;
  if (!value || *value != '"') return;
  for (const char *p = value + 1; *p != '"'; p++) {
    char letter = *p == '\\' ? unescaped(&p) : *p;
    if (n + 1 < size) out[n++] = letter;
  }
  out[n] = 0;
}

static const char *find(const char *of, const char *name) /* the value at this key; in a list, the text that is equal */
{
  char text[256];
  const char *found = NULL;
  for (const char *member = first_member(of); member; member = next_member(member)) {
    copy_text(text, sizeof text, member);
    if (!strcmp(text, name)) found = value_of(member);
  }
  return found;
}

static long long whole_number(const char *value, long long least, long long most, long long otherwise)
{
  size_t digits = value ? strspn(value, "0123456789") : 0;
  if (!digits || digits > 19 || !strchr(", \t\r\n]}", value[digits])) return otherwise;
  unsigned long long number = strtoull(value, NULL, 10);
  return number < (unsigned long long)least || number > (unsigned long long)most ? otherwise : (long long)number;
}

static double number_or(double otherwise, const char *value, double most) /* from 0 on */
{
  if (!value || !strchr("0123456789", *value)) return otherwise;
  double number = strtod(value, NULL);
  return number <= most ? number : otherwise;
}

/* ---- Processes and users ---- */

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

static long long start_of_process(long long pid) /* 0: not known */
{
  char state;
  long long start;
  return read_process(pid, &state, &start) ? start : 0;
}

static bool process_has_ended(long long pid, long long start)
{
  char state;
  long long started;
  if (read_process(pid, &state, &started)) return state == 'Z' || state == 'X' || started != start;
  return kill((pid_t)pid, 0) && errno == ESRCH;
}

static bool find_owner_of_process(long pid, uid_t *owner)
{
  char path[64];
  struct stat s;
  put(path, sizeof path, "/proc/%ld", pid);
  if (stat(path, &s)) return false;
  *owner = s.st_uid;
  return true;
}

static bool is_for_me(const char *whom) /* user:NAME or group:NAME */
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

static bool is_nobody(uid_t uid) /* all whom this user namespace does not know */
{
  unsigned long inside = 1, outside = 1, length = 0;
  FILE *file = fopen("/proc/self/uid_map", "re");
  if (!file) return false;
  if (fscanf(file, "%lu %lu %lu", &inside, &outside, &length) != 3) inside = outside = length = 0;
  fclose(file);
  return uid == 65534 && (inside || outside || length != 4294967295UL);
}

/* ---- Files and locks ---- */

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

static bool same_file(int fd, int directory, const char *name)
{
  struct stat a, b;
  if (fstat(fd, &a) || fstatat(directory, name, &b, AT_SYMLINK_NOFOLLOW)) return false;
  return a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

static struct flock whole_file(short type) { return (struct flock){.l_type = type, .l_whence = SEEK_SET}; }

static void on_alarm(int signal) { (void)signal; }

static void alarm_after(double s) /* and again, in case it fell between two calls; 0: no more */
{
  struct sigaction action = {.sa_handler = on_alarm}; /* without SA_RESTART: a sleep ends */
  struct itimerval timer = {{0, 20000}, {(time_t)s, (suseconds_t)((s - (double)(time_t)s) * 1e6)}};
  if (s <= 0) timer.it_interval = timer.it_value = (struct timeval){0, 0};
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &timer, NULL);
}

static bool wait_for_read_lock(int fd, double until) /* false: somebody else has a write lock still */
{
  struct flock lock = whole_file(F_RDLCK);
  int failed;
  alarm_after(until - now() > 0.001 ? until - now() : 0.001);
  while ((failed = fcntl(fd, F_OFD_SETLKW, &lock)) && errno == EINTR && now() < until) {}
  alarm_after(0);
  return !failed;
}
