/* A program that does with itself what an Ollama host does, to be started by scripts/ollama-serve.
 *
 * Started with any words, it reports how: one line of key=value, every text in hexadecimal. Started with `serve` or
 * `start`, it then takes commands from its standard input, one a line, until the end or `exit STATUS`:
 *
 *     spawn WORD ...       starts its own executable with these words (in hexadecimal) and copies its output
 *     interrupt WORD ...   the same, and sends it SIGINT after its first line
 *
 * It finds its executable as Go does, anew for every spawn: on Linux what /proc/self/exe says, without " (deleted)";
 * with STANDIN_RESOLVE=start, as on macOS, the path by which it was started. Symbolic links are then resolved. Its
 * libraries it looks for once, at the start, and forces their paths on its children.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
__attribute__((used)) static const char own_runner[] = "x/mlxrunner"; /* what the launcher knows a host by */
__attribute__((used)) static const char sees[] = "ollama/x/models/qwen3_5.(*Model).PrepareMedia"; /* and its eyes by */
static char libraries[2 * PATH_MAX];
static char line[1 << 20];

static void put_hex(const char *text) {
  for (; *text; text++)
    printf("%02x", (unsigned char)*text);
}

static void put(const char *key, const char *text) {
  printf(" %s=", key);
  put_hex(text);
}

static void put_list(const char *key, char **list) {
  printf(" %s=", key);
  for (; *list; list++) {
    put_hex(*list);
    putchar(',');
  }
}

static void read_link(const char *link, char *result) {
  ssize_t length = readlink(link, result, PATH_MAX - 1);
  result[length < 0 ? 0 : length] = 0;
}

static void find_executable(char *result) {
  static const char deleted[] = " (deleted)";
  char path[PATH_MAX];
  const char *how = getenv("STANDIN_RESOLVE");
  if (how && strcmp(how, "start") == 0)
    snprintf(path, sizeof path, "%s", (const char *)getauxval(AT_EXECFN));
  else {
    read_link("/proc/self/exe", path);
    size_t length = strlen(path), tail = strlen(deleted);
    if (length > tail && strcmp(path + length - tail, deleted) == 0)
      path[length - tail] = 0;
  }
  if (!realpath(path, result))
    strcpy(result, path);
}

static void find_libraries(void) {
  char executable[PATH_MAX];
  struct stat status;
  find_executable(executable);
  *strrchr(executable, '/') = 0;
  snprintf(libraries, sizeof libraries, "%s/../lib/ollama", executable);
  if (stat(libraries, &status) != 0)
    strcpy(libraries, executable);
}

static void report(char **argv) {
  char text[PATH_MAX], mask[64] = "", row[256];
  FILE *status = fopen("/proc/self/status", "r");
  while (status && fgets(row, sizeof row, status))
    sscanf(row, "SigIgn: %63s", mask);
  if (status)
    fclose(status);
  printf("report pid=%d", getpid());
  read_link("/proc/self/exe", text);
  put("exe", text);
  put("cwd", getcwd(text, sizeof text));
  put("libraries", libraries);
  put("ignored", mask);
  put_list("argv", argv);
  put_list("environment", environ);
  putchar('\n');
  fflush(stdout);
}

static char *unhex(char *text) {
  char *to = text, *from = text;
  unsigned byte;
  for (; sscanf(from, "%2x", &byte) == 1; from += 2)
    *to++ = (char)byte;
  *to = 0;
  return text;
}

static void become(char **argv) {
  char text[3 * PATH_MAX];
  const char *before = getenv("LD_LIBRARY_PATH");
  snprintf(text, sizeof text, "%s:%s/mlx_cuda_v13%s%s", libraries, libraries, before ? ":" : "", before ? before : "");
  setenv("LD_LIBRARY_PATH", text, 1);
  snprintf(text, sizeof text, "%s/mlx_cuda_v13", libraries);
  setenv("CUDA_PATH", text, 1);
  setenv("CUDA_HOME", text, 1);
  execv(argv[0], argv);
  perror(argv[0]);
  _exit(126);
}

static void spawn(char *words, int interrupt) {
  char executable[PATH_MAX], buffer[65536], *argv[64];
  int pipes[2], status, count = 0;
  find_executable(executable);
  argv[count++] = executable;
  for (char *word = strtok(words, " \n"); word; word = strtok(NULL, " \n"))
    argv[count++] = strcmp(word, "-") == 0 ? "" : unhex(word);
  argv[count] = NULL;
  if (pipe2(pipes, O_CLOEXEC) != 0)
    exit(99);
  pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
    dup2(pipes[1], 1);
    dup2(pipes[1], 2);
    become(argv);
  }
  close(pipes[1]);
  printf("spawned %d\n", child);
  fflush(stdout);
  for (ssize_t length; (length = read(pipes[0], buffer, sizeof buffer)) > 0;) {
    fwrite(buffer, 1, length, stdout);
    fflush(stdout);
    if (interrupt && memchr(buffer, '\n', length))
      kill(child, SIGINT);
  }
  close(pipes[0]);
  waitpid(child, &status, 0);
  printf("ended %d\n", WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  fflush(stdout);
}

int main(int count, char **argv) {
  int serves = count > 1 && (strcmp(argv[1], "serve") == 0 || strcmp(argv[1], "start") == 0);
  find_libraries();
  report(argv);
  if (!serves) {
    if (getenv("STANDIN_LINGER")) {
      alarm(30 * atoi(getenv("STANDIN_LINGER")));
      pause();
    }
    return getenv("STANDIN_STATUS") ? atoi(getenv("STANDIN_STATUS")) : 0;
  }
  while (fgets(line, sizeof line, stdin)) {
    if (strncmp(line, "spawn ", 6) == 0)
      spawn(line + 6, 0);
    else if (strncmp(line, "interrupt ", 10) == 0)
      spawn(line + 10, 1);
    else if (strncmp(line, "exit ", 5) == 0)
      return atoi(line + 5);
  }
  return 0;
}
