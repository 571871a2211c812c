/* Threads that share one product at a time.
 *
 * A product is cut into blocks that depend on its shape alone, and so does its result, whatever the number of threads:
 * the caller and the threads take one block after the other until none is left. A thread whose core other programs hold
 * comes late and takes fewer, or none. (OpenBLAS warns on stderr if more than 64 threads call it.) */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

typedef void (*block_fn)(const void *product, int block);

enum {
  MOST_THREADS = 63,
  IDLE_SPINS = 12000, /* more than lies between two products of a forward: a thread that slept comes late */
  WAIT_SPINS = 4000,  /* for threads that other programs may keep from their cores */
};

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER, pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_wake = PTHREAD_COND_INITIALIZER, pool_left = PTHREAD_COND_INITIALIZER;
static atomic_uint round_number; /* of the present product; written with the lock held */
static atomic_int next_block, inside; /* `inside` counts the threads that take blocks; raised with the lock held */
static int blocks, open_to_threads, started;
static block_fn compute;
static const void *product_at_hand;

static int take_blocks(void) {
  int taken = 0;
  for (int block; (block = atomic_fetch_add(&next_block, 1)) < blocks; taken++) compute(product_at_hand, block);
  return taken;
}

static void *work(void *nothing) {
  unsigned seen = 0;
  for (;;) {
    for (int spin = 0; spin < IDLE_SPINS && atomic_load(&round_number) == seen; spin++) atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&pool_lock);
    while (atomic_load(&round_number) == seen) pthread_cond_wait(&pool_wake, &pool_lock);
    seen = atomic_load(&round_number);
    int joins = open_to_threads;
    if (joins) atomic_fetch_add(&inside, 1);
    pthread_mutex_unlock(&pool_lock);
    if (!joins) continue; /* too late for this one */
    take_blocks();
    if (atomic_fetch_sub(&inside, 1) == 1) {
      pthread_mutex_lock(&pool_lock);
      pthread_cond_signal(&pool_left);
      pthread_mutex_unlock(&pool_lock);
    }
  }
  return nothing;
}

/* Starts threads until there are `wanted`, or no more can be had. */
static void start_threads(int wanted) {
  static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  sigset_t all, before;
  sigfillset(&all); /* signals are for Python's threads, but those by which this one crashes */
  for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) sigdelset(&all, crashes[i]);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (pthread_t thread; started < wanted && started < MOST_THREADS; started++) {
    if (pthread_create(&thread, NULL, work, NULL)) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A thread that another program keeps from its core holds up the caller, who waits for the blocks that it took: by more
 * than a short product gains. What sharing gains and loses is added up; when it has lost, short products are not shared
 * for a while, longer each time. */
static const double MOST_GAIN_S = 0.005, FIRST_REST_S = 0.02, LONGEST_REST_S = 1, FORGOTTEN_S = 1;
static double gained_s, rest_s, rests_until;

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Counts a product of `count` blocks: from `began` on the caller computed `own` of them, since `computed` it waited. */
static void count_gain(double began, double computed, int own, int count) {
  double now = now_s();
  if (own) gained_s += (computed - began) * count / own - (now - began);
  if (gained_s > MOST_GAIN_S) gained_s = MOST_GAIN_S;
  if (gained_s >= 0) return;
  if (now - rests_until > FORGOTTEN_S) rest_s = 0;
  rest_s = rest_s ? 2 * rest_s : FIRST_REST_S;
  if (rest_s > LONGEST_REST_S) rest_s = LONGEST_REST_S;
  rests_until = now + rest_s;
  gained_s = 0;
}

/* Computes all blocks of a product, with the help of the threads that were started. A caller that finds them at work for
 * another one computes all blocks itself, and so does that of a `brief` product while others want the cores. */
static void share(block_fn function, const void *product, int count, int brief) {
  if (pthread_mutex_trylock(&caller_lock)) {
    for (int block = 0; block < count; block++) function(product, block);
    return;
  }
  double began = brief ? now_s() : 0;
  if (began < rests_until && brief) {
    for (int block = 0; block < count; block++) function(product, block);
    pthread_mutex_unlock(&caller_lock);
    return;
  }
  pthread_mutex_lock(&pool_lock);
  compute = function;
  product_at_hand = product;
  blocks = count;
  atomic_store(&next_block, 0);
  open_to_threads = 1;
  atomic_fetch_add(&round_number, 1);
  pthread_cond_broadcast(&pool_wake);
  pthread_mutex_unlock(&pool_lock);
  int own = take_blocks();
  double computed = brief ? now_s() : 0;
  for (int spin = 0; spin < WAIT_SPINS && atomic_load(&inside); spin++) atomic_thread_fence(memory_order_seq_cst);
  pthread_mutex_lock(&pool_lock);
  open_to_threads = 0;
  while (atomic_load(&inside)) pthread_cond_wait(&pool_left, &pool_lock);
  pthread_mutex_unlock(&pool_lock);
  if (brief) count_gain(began, computed, own, count);
  pthread_mutex_unlock(&caller_lock);
}
