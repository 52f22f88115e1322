/* The protocols of the CUDA collectives (csrc/pcie_allreduce), for any number of calls.
 *
 * A rank is a stream of kernels, a kernel is a grid of blocks, and a block runs through the phases
 * of the call's algorithm: it pushes words to other ranks, then waits for theirs. What the model
 * takes from the machine, and nothing more:
 *
 *   - A store to another rank is under way until it is performed; stores are performed word by
 *     word in any order, whatever their source, their target or their age. Clearing a word is such
 *     a store too.
 *   - A fence waits until what its block stored before is performed.
 *   - When a kernel ends, its stores to its own memory are performed; those to other ranks may
 *     still be under way. The next kernel of the rank starts afterwards, its blocks one by one.
 *   - A block reads the epoch when it starts; nothing orders that against other blocks.
 *
 * Words carry the number of the call that wrote them (modulo 4: ranks are never two calls apart),
 * so that taking a word of another call is an assertion that fails. Ranks choose the same
 * algorithm and the same grid for a call, in every possible sequence. Waiting is a guard, so a
 * wait that cannot end is an invalid end state, and there is no cycle without finished calls.
 *
 * With BOUNDED a rank may die at any point, and a wait may end at its deadline (with DEATHS_ONLY
 * not if the awaited is merely late): the rank tells all others, poisons what it cannot compute
 * and ends, as does whoever hears of it. All must end, and no output may be wrong and look right.
 *
 * RANKS, BLOCKS, TILES, WORDS (of a packet) give the size; ONE_SHOT, TWO_SHOT, ... switch
 * algorithms on; BREAK_... breaks one mechanism. tests/protocols/test_models.py runs it. */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef TILES
#define TILES BLOCKS
#endif
#ifndef WORDS
#define WORDS 1
#endif

#ifdef BREAK_ONE_SLOT
#define SLOTS 1
#else
#define SLOTS 2
#endif
#define SLOT(e) ((e) % SLOTS)

#define NEXT(n) ((n) % 4 + 1)
#define PREVIOUS(n) (((n) + 2) % 4 + 1)

/* ---- Algorithms. LAST owns the only packet of a message smaller than one packet a rank. */

#define one_shot 1
#define two_shot 2
#define two_shot_single 3 /* one packet in all: one owner */
#define hierarchical 4
#define hierarchical_single 5
#define hierarchical_pull 6
#define pull 7 /* the step across islands of the former alone */
#define all_gather 8
#define broadcast 9
#define barrier 10

#define LAST (RANKS - 1)
#define SOURCE 0

#define PHASES(a) \
  (((a) == two_shot || (a) == two_shot_single) -> 2 : \
  (((a) >= hierarchical && (a) <= hierarchical_pull) -> 3 : 1))

/* Does rank s push data to rank d in phase p? Islands are {0, 1} and {2, 3}. */
#define SAME(s, d) ((s) / 2 == (d) / 2)
#define OWNER(r) ((r) % 2 == 1)
#define PUSHES(a, p, s, d) ((s) != (d) && ( \
  (a) == one_shot || (a) == two_shot || (a) == all_gather || (a) == pull || \
  ((a) == two_shot_single && (((p) == 0) -> ((d) == LAST) : ((s) == LAST))) || \
  (((a) == hierarchical || (a) == hierarchical_pull) && \
    (((p) == 1) -> ((s) % 2 == (d) % 2) : SAME(s, d))) || \
  ((a) == hierarchical_single && \
    (((p) == 1) -> (OWNER(s) && OWNER(d)) : \
      (SAME(s, d) && (((p) == 0) -> OWNER(d) : OWNER(s))))) || \
  ((a) == broadcast && (s) == SOURCE)))

/* Phases whose data is announced by a flag instead of being its own. */
#define FLAGGED(a, p) ((a) >= pull || ((a) == hierarchical_pull && (p) == 1))
#define PULLED(a, p) ((a) == pull || ((a) == hierarchical_pull && (p) == 1))

/* Does rank s send rank d a flag? Whoever has no data to send still does: the slots are reused on
 * the strength of every call making every rank depend on every other. */
#ifdef BREAK_NO_ACKNOWLEDGEMENT
#define FLAGS(a, p, s, d) (FLAGGED(a, p) && PUSHES(a, p, s, d))
#else
#define FLAGS(a, p, s, d) \
  (FLAGGED(a, p) && (s) != (d) && ((a) != hierarchical_pull || PUSHES(a, p, s, d)))
#endif

#define WAITS(a, p, s, d) ((FLAGGED(a, p)) -> (FLAGS(a, p, s, d)) : (PUSHES(a, p, s, d)))

/* Regions of the slab in use, one after the other. */
#ifdef ONE_SHOT
#define SCATTER 1
#else
#define SCATTER 0
#endif
#ifdef TWO_SHOT
#define ISLAND (SCATTER + 2)
#else
#define ISLAND SCATTER
#endif
#if defined(HIERARCHICAL) || defined(HIERARCHICAL_PULL)
#define GATHERED (ISLAND + 3)
#else
#define GATHERED ISLAND
#endif
#if defined(ALL_GATHER) || defined(BROADCAST)
#define STAGING (GATHERED + 1)
#else
#define STAGING GATHERED
#endif
#if defined(PULL) || defined(HIERARCHICAL_PULL)
#define NUM_REGIONS (STAGING + 1)
#else
#define NUM_REGIONS STAGING
#endif
#define REGION(a, p) ( \
  (PULLED(a, p)) -> STAGING : (((a) >= all_gather) -> GATHERED : \
  (((a) >= hierarchical) -> (ISLAND + (p)) : (((a) == one_shot) -> 0 : (SCATTER + (p))))))

#define PAIRS (RANKS * (RANKS - 1))
#define PAIR(s, d) ((s) * (RANKS - 1) + (((d) > (s)) -> ((d) - 1) : (d)))
#define CELL(region, slot, pair, t) \
  (((((region) * SLOTS + (slot)) * PAIRS + (pair)) * TILES + (t)) * WORDS)
/* What is staged lies in its writer's memory, once for all readers. Gathered sums stand by packet,
 * not by source: a message of one packet, owned by the last, takes the place of the first. */
#define PLACE(a, p, s, d) \
  ((PULLED(a, p)) -> ((s) * (RANKS - 1)) : \
  (((a) == two_shot_single && (p) == 1 && (d) != 0) -> (PAIR(0, d)) : (PAIR(s, d))))
#define DATA(a, p, slot, s, d, t) CELL(REGION(a, p), slot, PLACE(a, p, s, d), t)
#define SLOT_CELLS (SLOTS * PAIRS * TILES * WORDS) /* of a region */
#define NUM_SLOT_CELLS (GATHERED * SLOT_CELLS)
#define NUM_CELLS (NUM_REGIONS * SLOT_CELLS)
#if NUM_REGIONS > GATHERED || defined(BARRIER)
#define NUM_FLAGS (PAIRS * BLOCKS)
#else
#define NUM_FLAGS 0
#endif
#define FLAG(s, d, b) (NUM_CELLS + PAIR(s, d) * BLOCKS + (b))
/* A source may be one call ahead, never two. */
#ifdef BREAK_FLAG_NOT_AHEAD
#define RAISED(value, n) ((value) == (n))
#else
#define RAISED(value, n) ((value) == (n) || (value) == NEXT(n))
#endif
#define SIZE (NUM_CELLS + NUM_FLAGS)

#ifndef LENIENT
#define LENIENT false
#endif

#define SENTINEL 0
#define CLEARED 255 /* under way: a sentinel */
#define OLD 254     /* a word that is not cleared: of a call that all have ended */
#define POISON 253  /* an output */

/* What a block does next (stage). */
#define PUSHING 0
#define FENCING 1
#define POLLING 2
#define READING 3 /* a flag was seen */
#define OVER 4

byte memory[(SIZE + 15) / 16 * 16];
byte wire[(SIZE + 15) / 16 * 16]; /* 0: nothing under way to this word */

byte running[RANKS]; /* the kernel that runs: number of its call */
byte used[RANKS];    /* its slot */
byte sent[RANKS];    /* the last kernel whose first pushes are out */
byte arrived[RANKS]; /* blocks that came to the kernel's end, as the kernel counts them */
byte left[RANKS];    /* the same, of all blocks, as the machine sees it */
byte epoch[RANKS * BLOCKS];
#ifdef BREAK_EPOCH_PER_BLOCK
#define EPOCH(r, b) epoch[(r) * BLOCKS + (b)]
#else
#define EPOCH(r, b) epoch[r]
#endif

/* By number of call: chosen by whoever launches it first, forgotten when all have ended it. */
byte algorithm[5], grid[5], finished[5];

#ifdef BOUNDED
bit somebody_died, gone[RANKS], dead[RANKS], aborted[RANKS], aborting[RANKS];
byte departed[RANKS]; /* blocks that will launch nothing more */
byte out[RANKS * TILES];
#ifdef BREAK_NO_POISON
#define FAILED_OUT 0 /* what stood there */
#else
#define FAILED_OUT POISON
#endif
#define DEAD(r) dead[r]
#define ABORTED(r) aborted[r]
#else
#define DEAD(r) false
#define ABORTED(r) false
#endif

/* Two stores to one word under way at once: which of them lasts would be open. Broken variants run
 * on (LENIENT), to show what comes of it. */
inline store(at, value) {
  assert(LENIENT || wire[at] == 0);
  wire[at] = value
}

#ifdef BOUNDED
/* Nobody will look any more at what rank x was sent: spares the search what makes no difference. */
inline bury(x) {
  gone[x] = 1;
  c = 0;
  do
  :: c == SIZE -> break
  :: else ->
     t = ((c < NUM_CELLS) -> ((c / (TILES * WORDS)) % PAIRS) : ((c - NUM_CELLS) / BLOCKS));
     s = t / (RANKS - 1);
     t = t % (RANKS - 1);
     t = ((t >= s) -> (t + 1) : t);
     if
     :: t == x && !(STAGING * SLOT_CELLS <= c && c < NUM_CELLS) -> memory[c] = 0; wire[c] = 0
     :: else
     fi;
     c++
  od;
  running[x] = 0;
  used[x] = 0;
  sent[x] = 0;
  arrived[x] = 0;
  left[x] = 0;
  epoch[x] = 0;
  aborted[x] = 0;
  aborting[x] = 0;
  t = 0;
  do
  :: t == TILES -> break
  :: else -> out[x * TILES + t] = 0; t++
  od;
  c = 0;
  s = 0;
  t = 0
}
#define GONE(r) gone[r]
#else
#define GONE(r) false
#endif

inline perform(at) {
  memory[at] = ((wire[at] == CLEARED) -> SENTINEL : wire[at]);
  wire[at] = 0
}

#define W1(i) :: d_step { wire[i] -> perform(i) }
#define W4(i) W1(i) W1(i + 1) W1(i + 2) W1(i + 3)
#define W16(i) W4(i) W4(i + 4) W4(i + 8) W4(i + 12)

active proctype interconnect() {
end:
  do
  W16(0)
#if SIZE > 16
  W16(16)
#endif
#if SIZE > 32
  W16(32)
#endif
#if SIZE > 48
  W16(48)
#endif
#if SIZE > 64
  W16(64)
#endif
#if SIZE > 80
  W16(80)
#endif
#if SIZE > 96
  W16(96)
#endif
#if SIZE > 112
  W16(112)
#endif
#if SIZE > 128
  W16(128)
#endif
#if SIZE > 144
#error more words than the interconnect carries
#endif
#ifdef BOUNDED
  :: d_step { aborting[0] -> aborted[0] = 1; aborting[0] = 0 }
  :: d_step { aborting[1] -> aborted[1] = 1; aborting[1] = 0 }
#if RANKS > 2
  :: d_step { aborting[2] -> aborted[2] = 1; aborting[2] = 0 }
#endif
#endif
  od
}

/* The algorithm and the grid of a call may be any, the same on all ranks. */
inline choose() {
  if
  :: algorithm[n] == 0 ->
     if
#ifdef ONE_SHOT
     :: algorithm[n] = one_shot
#endif
#ifdef TWO_SHOT
     :: algorithm[n] = two_shot
     :: algorithm[n] = two_shot_single
#endif
#ifdef HIERARCHICAL
     :: algorithm[n] = hierarchical
     :: algorithm[n] = hierarchical_single
#endif
#ifdef HIERARCHICAL_PULL
     :: algorithm[n] = hierarchical_pull
#endif
#ifdef PULL
     :: algorithm[n] = pull
#endif
#ifdef ALL_GATHER
     :: algorithm[n] = all_gather
#endif
#ifdef BROADCAST
     :: algorithm[n] = broadcast
#endif
#ifdef BARRIER
     :: algorithm[n] = barrier
#endif
     fi;
     if
     :: grid[n] = BLOCKS
#if BLOCKS > 1 && !defined(FULL_GRID)
     :: grid[n] = 1
#endif
     fi
  :: else
  fi
}

/* All data that the block sends in this phase; only what is performed later tells in which order.
 * What is staged is stored once, in the own memory. */
inline push() {
  t = b;
  do
  :: t >= TILES -> break
  :: else ->
     s = 0;
     do
     :: s == RANKS -> break
     :: s < RANKS && PUSHES(a, p, r, s) && (PULLED(a, p) || !GONE(s)) ->
        c = DATA(a, p, slot, r, s, t);
        w = 0;
        do
        :: w == WORDS -> break
        :: else -> store(c, n); c++; w++
        od;
        s = ((PULLED(a, p)) -> RANKS : (s + 1))
     :: else -> s++
     od;
     t = t + g
  od
}

/* Flags of one block follow each other in order: one address, and a kernel's end in between. */
inline raise() {
  s = 0;
  do
  :: s == RANKS -> break
  :: s < RANKS && FLAGS(a, p, r, s) && !GONE(s) -> wire[FLAG(r, s, b)] = n; s++
  :: else -> s++
  od
}

/* To the next thing that the block has to wait for. */
inline seek() {
  do
  :: stage == PUSHING ->
     push();
     t = b;
     s = 0;
     if
     :: FLAGGED(a, p) -> stage = FENCING; break
     :: else -> stage = POLLING
     fi
  :: stage == POLLING ->
     if
     :: t >= TILES ->
        p++;
        stage = ((p == PHASES(a)) -> OVER : PUSHING)
     :: t < TILES && s == RANKS -> s = 0; t = t + g
     :: t < TILES && s < RANKS && !(WAITS(a, p, s, r)) -> s++
     :: else -> break
     fi
  :: else -> break
  od
}

#define HERE DATA(a, p, slot, s, r, t)
#define READY (memory[HERE] != SENTINEL && LAST_WORD != SENTINEL)
#ifdef BREAK_FIRST_WORD_ONLY
#define LAST_WORD memory[HERE]
#else
#define LAST_WORD memory[HERE + WORDS - 1] /* WORDS <= 2 */
#endif

/* The block's data of this phase is performed. (TILES <= 2, RANKS <= 4, WORDS <= 2.) */
#define SENT(x, t) \
  CELL(REGION(a, p), slot, r * (RANKS - 1) + (((x) < RANKS - 1) -> (x) : 0), t)
#define STILL(x, t) (wire[SENT(x, t)] || wire[SENT(x, t) + WORDS - 1])
#define STILL_TILE(t) (STILL(0, t) || STILL(1, t) || STILL(2, t))
#ifdef BREAK_NO_FENCE
#define FENCED true
#else
#define FENCED (a == barrier || !(STILL_TILE(b) || (b + g < TILES && STILL_TILE(TILES - 1))))
#endif

inline take() {
  c = HERE;
  w = 0;
  do
  :: w == WORDS -> break
  :: else ->
     assert(memory[c] == n); /* of this call: neither stale, nor early, nor missing */
#ifdef BREAK_NO_CLEAR
#elif defined(BREAK_WRONG_CLEAR)
     if
     :: FLAGGED(a, p)
     :: else ->
        c = c - HERE + DATA(a, p, 1 - slot, s, r, t);
        store(c, CLEARED);
        c = c - DATA(a, p, 1 - slot, s, r, t) + HERE
     fi;
#else
     if
     :: FLAGGED(a, p)
     :: else -> store(c, CLEARED)
     fi;
#endif
     c++;
     w++
  od
}

/* All ranks have ended call n. What it left behind is old for ever, not four calls later new again:
 * numbers do not wrap here. (A slot keeps nothing: end_kernel.) */
inline forget() {
  c = NUM_SLOT_CELLS;
  do
  :: c == SIZE -> break
  :: else ->
     if :: memory[c] == n -> memory[c] = OLD :: else fi;
     if :: wire[c] == n -> wire[c] = OLD :: else fi;
     c++
  od;
  c = 0
}

/* The kernel of rank r is over: what it stored to its own memory is performed, no word is left in
 * the slots it read, and the next one may start. */
inline end_kernel() {
  slot = used[r];
  used[r] = 0;
  p = 0;
  do
  :: p == PHASES(a) -> break
  :: p < PHASES(a) && !(FLAGGED(a, p)) ->
     s = 0;
     do
     :: s == RANKS -> break
     :: s < RANKS && PUSHES(a, p, s, r) ->
        c = DATA(a, p, slot, s, r, 0);
        t = 0;
        do
        :: t == TILES * WORDS -> break
        :: else ->
           if
           :: wire[c] == CLEARED -> perform(c)
           :: else
           fi;
           assert(LENIENT || ABORTED(r) || (memory[c] == SENTINEL && wire[c] == 0));
           c++;
           t++
        od;
        s++
     :: else -> s++
     od;
     p++
  :: else -> p++
  od;
#ifdef BOUNDED
  t = 0;
  do
  :: t == TILES -> break
  :: else ->
     assert(out[r * TILES + t] == n || out[r * TILES + t] == POISON);
     out[r * TILES + t] = 0;
     t++
  od;
#endif
  running[r] = NEXT(running[r]);
  finished[n]++;
  if
  :: finished[n] == RANKS -> finished[n] = 0; algorithm[n] = 0; grid[n] = 0; forget()
  :: else
  fi
}

inline arrive() {
  if
  :: b < g ->
     arrived[r]++;
#ifdef BREAK_EPOCH_PER_BLOCK
     EPOCH(r, b) = NEXT(EPOCH(r, b));
#elif defined(BREAK_EPOCH_BY_FIRST)
     if :: arrived[r] == 1 -> EPOCH(r, b) = NEXT(EPOCH(r, b)) :: else fi;
#elif defined(BREAK_EPOCH_OF_HOST)
#else
     if :: arrived[r] == g -> EPOCH(r, b) = NEXT(EPOCH(r, b)) :: else fi;
#endif
     if :: arrived[r] == g -> arrived[r] = 0 :: else fi
#ifdef BOUNDED
     t = b;
     do
     :: t >= TILES -> break
     :: else -> out[r * TILES + t] = ((failed) -> FAILED_OUT : n); t = t + g
     od
#endif
  :: else
  fi;
  left[r]++;
  if
  :: left[r] == BLOCKS -> left[r] = 0; end_kernel()
  :: else
  fi
}

#ifdef BOUNDED
#ifdef DEATHS_ONLY
#define PATIENCE somebody_died /* a deadline so long that only a death exceeds it */
#else
#define PATIENCE true
#endif
#define LATE ((FLAGGED(a, p)) -> (!(RAISED(memory[FLAG(s, r, b)], n))) : (!READY))

/* A deadline passed: everybody is told. */
inline abort_all() {
  aborted[r] = 1;
  s = 0;
  do
  :: s == RANKS -> break
  :: s < RANKS && (s == r || gone[s]) -> s++
  :: else -> aborting[s] = 1; s++
  od
}
#endif

/* Blocks of a kernel start when the one before it is over, or once its first pushes are out. */
#ifdef BREAK_EARLY_LAUNCH
#define STARTS(r, n) (running[r] == (n) || (running[r] == PREVIOUS(n) && sent[r] == PREVIOUS(n)))
#define STRIDE 2 /* blocks of two kernels at a time */
#define STRIDE_RUN run block(r, b, 2);
#else
#define STARTS(r, n) (running[r] == (n))
#define STRIDE 1
#define STRIDE_RUN
#endif

proctype block(byte r; byte b; byte n) {
  byte a, g, slot, p, t, s, w, c, stage;
  bit failed;
  do
  :: atomic {
       STARTS(r, n) && !DEAD(r) ->
       choose();
       d_step {
         a = algorithm[n];
         g = grid[n];
#ifdef BREAK_EARLY_LAUNCH
         slot = SLOT(n);
#else
         slot = SLOT(EPOCH(r, b));
#endif
         if
         :: ABORTED(r) -> failed = 1; stage = OVER
         :: !ABORTED(r) && b >= g -> stage = OVER
         :: else -> stage = PUSHING; seek(); sent[r] = n; used[r] = slot
         fi;
         w = 0;
         c = 0
       }
     };
     do
     :: d_step {
          stage == FENCING && FENCED && !DEAD(r) ->
          raise();
          stage = POLLING; t = b; s = 0; seek(); w = 0; c = 0
        }
     :: d_step {
          stage == POLLING && !(FLAGGED(a, p)) && READY && !DEAD(r) ->
          take();
          s++; seek(); w = 0; c = 0
        }
     :: d_step {
          stage == POLLING && FLAGGED(a, p) && RAISED(memory[FLAG(s, r, b)], n) && !DEAD(r) ->
          if
          :: PUSHES(a, p, s, r) -> stage = READING
          :: else -> s++; seek(); w = 0; c = 0
          fi
        }
     :: d_step {
          stage == READING && !DEAD(r) ->
          take();
          s++; stage = POLLING; seek(); w = 0; c = 0
        }
#ifdef BOUNDED
     :: d_step { stage < OVER && aborted[r] && !dead[r] -> failed = 1; stage = OVER }
#ifndef BREAK_NO_BOUND
     :: d_step {
          stage == POLLING && LATE && !dead[r] && PATIENCE ->
          abort_all();
          failed = 1; stage = OVER
        }
#endif
#endif
     :: d_step {
          stage == OVER && running[r] == n && !DEAD(r) ->
          arrive();
          a = 0; g = 0; slot = 0; p = 0; t = 0; s = 0; w = 0; c = 0; stage = 0
        };
        break
     :: DEAD(r) -> goto done
     od;
     if
     :: failed -> break
     :: else -> n = ((STRIDE == 2) -> (NEXT(NEXT(n))) : NEXT(n))
     fi
  :: DEAD(r) -> break
  od;
done:
  skip
#ifdef BOUNDED
  ;
  d_step {
    n = 0; a = 0; g = 0; slot = 0; p = 0; t = 0; s = 0; w = 0; c = 0; stage = 0; failed = 0;
    departed[r]++;
    if
    :: departed[r] == BLOCKS && !gone[r] -> bury(r)
    :: else
    fi
  }
#endif
}

init {
  byte r, b, c, s, t;
  atomic {
    do
    :: r == RANKS -> break
    :: else ->
       running[r] = 1;
       sent[r] = 4;
       b = 0;
       do
       :: b == BLOCKS -> break
       :: else -> epoch[r * BLOCKS + b] = 1; run block(r, b, 1); STRIDE_RUN b++
       od;
       r++
    od
  }
#ifdef BOUNDED
  /* A rank dies, at any time. Numbers of calls being relative, it may be in rank 0's first one. */
end:
  if
  :: d_step { running[0] == 1 -> dead[0] = 1; somebody_died = 1; bury(0) }
  :: d_step { running[0] == 1 -> dead[1] = 1; somebody_died = 1; bury(1) }
#if RANKS > 2
  :: d_step { running[0] == 1 -> dead[2] = 1; somebody_died = 1; bury(2) }
#endif
  fi
#endif
}
