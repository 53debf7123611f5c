; Device library of tdx.language for AMD GPUs (gfx942, gfx950), in the text form of LLVM IR: Triton links it into
; kernels, so no vendor compiler is needed.
;
; Addresses are 64-bit integers because Triton passes scalars only. Atomics without a syncscope
; have system scope. Offsets into the control block and the fault record are those of tdx/abi.py;
; tests compare each "; NAME" comment with it, and the part below "shared" with the other vendor's.

target triple = "amdgcn-amd-amdhsa"

declare i32 @llvm.amdgcn.workitem.id.x()
declare i64 @llvm.amdgcn.s.memrealtime()
declare void @llvm.amdgcn.s.sleep(i32)

; Nanoseconds, of a clock that ticks at 100 MHz.
define i64 @tdx_now() alwaysinline {
  %ticks = call i64 @llvm.amdgcn.s.memrealtime()
  %now = mul i64 %ticks, 10
  ret i64 %now
}

define void @tdx_pause() alwaysinline {
  call void @llvm.amdgcn.s.sleep(i32 1)
  ret void
}

; The value itself, opaque to Triton: lets each thread's own scalar enter a block.
define i32 @tdx_per_thread(i32 %lane, i32 %value) alwaysinline {
  ret i32 %value
}

; After a barrier: no later load moves above it.
define i32 @tdx_after_barrier() alwaysinline {
  fence syncscope("workgroup") acquire
  ret i32 0
}

; This wave's stores have left it. Needed in every wave ahead of the barrier of a notify:
; s_barrier waits for no store, and a release waits for the stores of its own wave only.
define i32 @tdx_drain() alwaysinline {
  call void asm sideeffect "s_waitcnt vmcnt(0)", "~{memory}"()
  ret i32 0
}

define i32 @tdx_may_publish(i32 %when, i64 %control) alwaysinline {
entry:
  %thread = call i32 @llvm.amdgcn.workitem.id.x()
  %zero = icmp eq i32 %thread, 0
  %wanted = icmp ne i32 %when, 0
  %look = and i1 %zero, %wanted
  br i1 %look, label %fault, label %done
fault:
  %standing = call i64 @tdx_fault(i64 %control)
  %clear = icmp eq i64 %standing, 0
  %may = zext i1 %clear to i32
  br label %done
done:
  %result = phi i32 [ 0, %entry ], [ %may, %fault ]
  ret i32 %result
}

define i32 @tdx_publish_set(i64 %address, i32 %value, i32 %may) alwaysinline {
entry:
  %yes = icmp ne i32 %may, 0
  br i1 %yes, label %store, label %done
store:
  %released = call i32 @tdx_release()
  %word = inttoptr i64 %address to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %word monotonic, align 4
  br label %done
done:
  ret i32 0
}

define i32 @tdx_publish_add(i64 %address, i32 %value, i32 %may) alwaysinline {
entry:
  %yes = icmp ne i32 %may, 0
  br i1 %yes, label %add, label %done
add:
  %released = call i32 @tdx_release()
  %word = inttoptr i64 %address to ptr addrspace(1)
  %old = atomicrmw add ptr addrspace(1) %word, i32 %value monotonic
  br label %done
done:
  ret i32 0
}

; Release for a relaxed store or atomic that follows. The explicit wait is for the write-back of
; the L2 cache, which the LLVM of Triton 3.6 leaves out when it knows of no store under way.
define i32 @tdx_release() alwaysinline {
  fence release
  call void asm sideeffect "s_waitcnt vmcnt(0)", "~{memory}"()
  ret i32 0
}

; Orders this thread's earlier accesses before its later ones for every observer.
define i32 @tdx_fence() alwaysinline {
  %released = call i32 @tdx_release()
  fence acquire
  ret i32 0
}

; 0, in a way that the compiler cannot see through.
define i32 @tdx_zero(i32 %token) alwaysinline {
  %zero = call i32 asm "s_mov_b32 $0, 0 ; $1", "=s,v"(i32 %token)
  ret i32 %zero
}

; Calls would need a stack, which the kernels do without.
attributes #0 = { alwaysinline }

; ---- shared

; Is the awaited value there? %cmp 0: (seen - value) >= 0 as signed difference, 1: equal.
define i1 @tdx_satisfied(i32 %seen, i32 %value, i32 %cmp) alwaysinline {
  %difference = sub i32 %seen, %value
  %ge = icmp sge i32 %difference, 0
  %eq = icmp eq i32 %seen, %value
  %equal = icmp eq i32 %cmp, 1
  %ok = select i1 %equal, i1 %eq, i1 %ge
  ret i1 %ok
}

; The fault word: 0 while no fault stands.
define i64 @tdx_fault(i64 %control) alwaysinline {
  %word = inttoptr i64 %control to ptr addrspace(1)
  %fault = load atomic i64, ptr addrspace(1) %word monotonic, align 8          ; CONTROL_FAULT
  ret i64 %fault
}

; The first to claim writes the record, publishes it by its state, and sets the fault word last, for
; which the others wait: a kernel that ends because of the fault ends when the host can see why.
define void @tdx_expire(i64 %address, i32 %value, i32 %seen, i64 %control, i32 %team, i32 %peer,
                        i32 %program) alwaysinline {
entry:
  %word = inttoptr i64 %control to ptr addrspace(1)
  %claimed = getelementptr i64, ptr addrspace(1) %word, i64 3                  ; CONTROL_CLAIM
  %claim = atomicrmw xchg ptr addrspace(1) %claimed, i32 1 monotonic
  %won = icmp eq i32 %claim, 0
  br i1 %won, label %report, label %done
report:
  %where = getelementptr i64, ptr addrspace(1) %word, i64 1                    ; CONTROL_RECORD
  %address.record = load i64, ptr addrspace(1) %where, align 8
  %record = inttoptr i64 %address.record to ptr addrspace(1)
  %kind = getelementptr i64, ptr addrspace(1) %record, i64 1                   ; RECORD_KIND
  store atomic i64 1, ptr addrspace(1) %kind monotonic, align 8                ; FAULT_TIMEOUT
  %team.field = getelementptr i64, ptr addrspace(1) %record, i64 2             ; RECORD_TEAM
  %team.wide = sext i32 %team to i64
  store atomic i64 %team.wide, ptr addrspace(1) %team.field monotonic, align 8
  %peer.field = getelementptr i64, ptr addrspace(1) %record, i64 3             ; RECORD_PEER
  %peer.wide = sext i32 %peer to i64
  store atomic i64 %peer.wide, ptr addrspace(1) %peer.field monotonic, align 8
  %signal = getelementptr i64, ptr addrspace(1) %record, i64 4                 ; RECORD_SIGNAL
  store atomic i64 %address, ptr addrspace(1) %signal monotonic, align 8
  %expected = getelementptr i64, ptr addrspace(1) %record, i64 5               ; RECORD_EXPECTED
  %value.wide = sext i32 %value to i64
  store atomic i64 %value.wide, ptr addrspace(1) %expected monotonic, align 8
  %seen.field = getelementptr i64, ptr addrspace(1) %record, i64 6             ; RECORD_SEEN
  %seen.wide = sext i32 %seen to i64
  store atomic i64 %seen.wide, ptr addrspace(1) %seen.field monotonic, align 8
  %program.field = getelementptr i64, ptr addrspace(1) %record, i64 7          ; RECORD_PROGRAM
  %program.wide = sext i32 %program to i64
  store atomic i64 %program.wide, ptr addrspace(1) %program.field monotonic, align 8
  store atomic i64 1, ptr addrspace(1) %record release, align 8                ; RECORD_STATE
  store atomic i64 1, ptr addrspace(1) %word release, align 8                  ; FAULT_TIMEOUT
  br label %done
done:
  %standing = call i64 @tdx_fault(i64 %control)
  %stands = icmp ne i64 %standing, 0
  br i1 %stands, label %told, label %done
told:
  ret void
}

; After failed poll number %polls: may the caller poll on? Looks at the fault word and the clock
; once in 64 polls. Returns the time the waiting began (0: not looked yet), or -1 to give up.
define i64 @tdx_patience(i32 %polls, i64 %start, i64 %address, i32 %value, i32 %seen,
                         i64 %control, i32 %team, i32 %peer, i32 %program) alwaysinline {
entry:
  %low = and i32 %polls, 63
  %look = icmp eq i32 %low, 63
  br i1 %look, label %slow, label %on
on:
  ret i64 %start
slow:
  %begun = call i64 @tdx_look(i64 %start, i64 %address, i32 %value, i32 %seen, i64 %control,
                              i32 %team, i32 %peer, i32 %program)
  ret i64 %begun
}

; The part of tdx_patience that runs once in 64 polls.
define i64 @tdx_look(i64 %start, i64 %address, i32 %value, i32 %seen, i64 %control, i32 %team,
                     i32 %peer, i32 %program) alwaysinline {
entry:
  %standing = call i64 @tdx_fault(i64 %control)
  %stands = icmp ne i64 %standing, 0
  br i1 %stands, label %give.up, label %clock
clock:
  %word = inttoptr i64 %control to ptr addrspace(1)
  %timeout.word = getelementptr i64, ptr addrspace(1) %word, i64 2             ; CONTROL_TIMEOUT_NS
  %timeout = load i64, ptr addrspace(1) %timeout.word, align 8
  %now = call i64 @tdx_now()
  %first = icmp eq i64 %start, 0
  %begun = select i1 %first, i64 %now, i64 %start
  %waited = sub i64 %now, %begun
  %late = icmp ugt i64 %waited, %timeout
  %bounded = icmp ne i64 %timeout, 0
  %expired = and i1 %late, %bounded
  br i1 %expired, label %expire, label %later
later:
  ret i64 %begun
expire:
  call void @tdx_expire(i64 %address, i32 %value, i32 %seen, i64 %control, i32 %team, i32 %peer,
                        i32 %program)
  br label %give.up
give.up:
  ret i64 -1
}

; Waits for the 32-bit word at %address, acquire. 1: satisfied; 0: the deadline passed or a fault
; stands.
define i32 @tdx_spin(i64 %address, i32 %value, i32 %cmp, i64 %control, i32 %team, i32 %peer,
                     i32 %program) alwaysinline {
entry:
  %word = inttoptr i64 %address to ptr addrspace(1)
  br label %poll
poll:
  %polls = phi i32 [ 0, %entry ], [ %polls.next, %again ]
  %start = phi i64 [ 0, %entry ], [ %start.next, %again ]
  %seen = load atomic i32, ptr addrspace(1) %word acquire, align 4
  %ok = call i1 @tdx_satisfied(i32 %seen, i32 %value, i32 %cmp)
  br i1 %ok, label %done, label %missed
missed:
  %start.next = call i64 @tdx_patience(i32 %polls, i64 %start, i64 %address, i32 %value,
                                       i32 %seen, i64 %control, i32 %team, i32 %peer,
                                       i32 %program)
  %gave.up = icmp eq i64 %start.next, -1
  br i1 %gave.up, label %done, label %again
again:
  %polls.next = add i32 %polls, 1
  call void @tdx_pause()
  br label %poll
done:
  %result = phi i32 [ 1, %poll ], [ 0, %missed ]
  ret i32 %result
}

; Words %first, %first + %step, ... below %count, starting at %base: all satisfied?
; Word i belongs to peer %peer + i.
define i32 @tdx_spin_span(i32 %first, i32 %step, i32 %count, i64 %base, i32 %value, i32 %cmp,
                          i64 %control, i32 %team, i32 %peer, i32 %program) alwaysinline {
entry:
  br label %head
head:
  %index = phi i32 [ %first, %entry ], [ %index.next, %next ]
  %more = icmp slt i32 %index, %count
  br i1 %more, label %wait, label %done
wait:
  %index.wide = sext i32 %index to i64
  %offset = shl i64 %index.wide, 2
  %address = add i64 %base, %offset
  %word.peer = add i32 %peer, %index
  %ok = call i32 @tdx_spin(i64 %address, i32 %value, i32 %cmp, i64 %control, i32 %team,
                           i32 %word.peer, i32 %program)
  %satisfied = icmp ne i32 %ok, 0
  br i1 %satisfied, label %next, label %done
next:
  %index.next = add i32 %index, %step
  br label %head
done:
  %result = phi i32 [ 1, %head ], [ 0, %wait ]
  ret i32 %result
}

; For wait_any, in which the program polls many words at once and decides on all of them. Has the
; word at %address reached %value? Acquire; 0 where inactive.
define i32 @tdx_ready(i64 %address, i32 %value, i32 %active) alwaysinline {
entry:
  %idle = icmp eq i32 %active, 0
  br i1 %idle, label %done, label %load
load:
  %word = inttoptr i64 %address to ptr addrspace(1)
  %seen = load atomic i32, ptr addrspace(1) %word acquire, align 4
  %there = call i1 @tdx_satisfied(i32 %seen, i32 %value, i32 0)
  %ready = zext i1 %there to i32
  br label %done
done:
  %result = phi i32 [ 0, %entry ], [ %ready, %load ]
  ret i32 %result
}

; tdx_patience for one of the words of wait_any; where inactive or there by now, as if just begun.
define i64 @tdx_patience_lane(i32 %polls, i64 %start, i64 %address, i32 %value, i32 %active,
                              i64 %control, i32 %team, i32 %program) alwaysinline {
entry:
  %low = and i32 %polls, 63
  %early = icmp ne i32 %low, 63
  %idle = icmp eq i32 %active, 0
  %skip = or i1 %early, %idle
  br i1 %skip, label %done, label %look
look:
  %word = inttoptr i64 %address to ptr addrspace(1)
  %seen = load atomic i32, ptr addrspace(1) %word monotonic, align 4
  %there = call i1 @tdx_satisfied(i32 %seen, i32 %value, i32 0)
  br i1 %there, label %done, label %ask
ask:
  %begun = call i64 @tdx_patience(i32 %polls, i64 %start, i64 %address, i32 %value, i32 %seen,
                                  i64 %control, i32 %team, i32 -1, i32 %program)
  br label %done
done:
  %result = phi i64 [ %start, %entry ], [ %start, %look ], [ %begun, %ask ]
  ret i64 %result
}

; A data-and-flag word: the flag from bit %shift on. %word was already loaded; polls on until the
; flag is right. Returns the low half of the word, and 1 (or 0: gave up) in the high half.
define i64 @tdx_settle(i64 %word, i64 %address, i32 %shift, i32 %flag, i32 %active, i64 %control,
                       i32 %team, i32 %peer, i32 %program) alwaysinline {
entry:
  %pointer = inttoptr i64 %address to ptr addrspace(1)
  %shift.wide = zext i32 %shift to i64
  br label %look
look:
  %polls = phi i32 [ 0, %entry ], [ %polls.next, %again ]
  %start = phi i64 [ 0, %entry ], [ %start.next, %again ]
  %now = phi i64 [ %word, %entry ], [ %loaded, %again ]
  %high = lshr i64 %now, %shift.wide
  %seen = trunc i64 %high to i32
  %there = icmp eq i32 %seen, %flag
  %idle = icmp eq i32 %active, 0
  %ok = or i1 %there, %idle
  br i1 %ok, label %done, label %missed
missed:
  %start.next = call i64 @tdx_patience(i32 %polls, i64 %start, i64 %address, i32 %flag, i32 %seen,
                                       i64 %control, i32 %team, i32 %peer, i32 %program)
  %gave.up = icmp eq i64 %start.next, -1
  br i1 %gave.up, label %done, label %again
again:
  %polls.next = add i32 %polls, 1
  call void @tdx_pause()
  %loaded = load atomic i64, ptr addrspace(1) %pointer monotonic, align 8
  br label %look
done:
  %status = phi i64 [ 4294967296, %look ], [ 0, %missed ]
  %data = and i64 %now, 4294967295
  %result = or i64 %data, %status
  ret i64 %result
}

; One data-and-flag word, without waiting; 0 where inactive.
define i64 @tdx_peek(i64 %address, i32 %active) alwaysinline {
entry:
  %idle = icmp eq i32 %active, 0
  br i1 %idle, label %done, label %load
load:
  %pointer = inttoptr i64 %address to ptr addrspace(1)
  %loaded = load atomic i64, ptr addrspace(1) %pointer monotonic, align 8
  br label %done
done:
  %word = phi i64 [ 0, %entry ], [ %loaded, %load ]
  ret i64 %word
}

define i32 @tdx_poke(i64 %address, i64 %word, i32 %active) alwaysinline {
entry:
  %idle = icmp eq i32 %active, 0
  br i1 %idle, label %done, label %store
store:
  %pointer = inttoptr i64 %address to ptr addrspace(1)
  store atomic i64 %word, ptr addrspace(1) %pointer monotonic, align 8
  br label %done
done:
  ret i32 0
}

; The data-and-flag words of the %ranks ranks whose bit is set in %active: rank p's %words words
; are at %base + p * %stride bytes, each pair of them %gap bytes behind the one before. Waits for
; those that are missing. 1: all there; 0: gave up.
define i32 @tdx_settle_all(i32 %missing, i64 %base, i64 %stride, i64 %gap, i32 %words, i32 %shift,
                           i32 %flag, i32 %active, i32 %ranks, i64 %control, i32 %team,
                           i32 %program) alwaysinline {
entry:
  %none = icmp eq i32 %missing, 0
  br i1 %none, label %done, label %slow
slow:
  %settled = call i32 @tdx_settle_missing(i64 %base, i64 %stride, i64 %gap, i32 %words,
                                          i32 %shift, i32 %flag, i32 %active, i32 %ranks,
                                          i64 %control, i32 %team, i32 %program)
  br label %done
done:
  %result = phi i32 [ 1, %entry ], [ %settled, %slow ]
  ret i32 %result
}

; The part of tdx_settle_all that waits.
define i32 @tdx_settle_missing(i64 %base, i64 %stride, i64 %gap, i32 %words, i32 %shift,
                               i32 %flag, i32 %active, i32 %ranks, i64 %control, i32 %team,
                               i32 %program) #0 {
entry:
  br label %rank
rank:
  %p = phi i32 [ 0, %entry ], [ %p.next, %next ]
  %shifted = lshr i32 %active, %p
  %bit = and i32 %shifted, 1
  %wanted = icmp ne i32 %bit, 0
  br i1 %wanted, label %word, label %next
word:
  %k = phi i32 [ 0, %rank ], [ %k.next, %there ]
  %p.wide = sext i32 %p to i64
  %distance = mul i64 %p.wide, %stride
  %pair = lshr i32 %k, 1
  %pair.wide = sext i32 %pair to i64
  %pair.offset = mul i64 %pair.wide, %gap
  %half = and i32 %k, 1
  %half.wide = sext i32 %half to i64
  %half.offset = shl i64 %half.wide, 3
  %slot = add i64 %base, %distance
  %pair.address = add i64 %slot, %pair.offset
  %address = add i64 %pair.address, %half.offset
  %first = call i64 @tdx_peek(i64 %address, i32 1)
  %settled = call i64 @tdx_settle(i64 %first, i64 %address, i32 %shift, i32 %flag, i32 1,
                                  i64 %control, i32 %team, i32 %p, i32 %program)
  %status = lshr i64 %settled, 32
  %ok = icmp ne i64 %status, 0
  br i1 %ok, label %there, label %done
there:
  %k.next = add i32 %k, 1
  %more.words = icmp slt i32 %k.next, %words
  br i1 %more.words, label %word, label %next
next:
  %p.next = add i32 %p, 1
  %more = icmp slt i32 %p.next, %ranks
  br i1 %more, label %rank, label %done
done:
  %result = phi i32 [ 0, %word ], [ 1, %next ]
  ret i32 %result
}
