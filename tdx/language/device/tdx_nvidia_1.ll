; Device library of tdx.language for NVIDIA GPUs; links after tdx_common.
target triple = "nvptx64-nvidia-cuda"

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i64 @tdx_fault(i64)
declare i32 @tdx_spin_span(i32, i32, i32, i64, i32, i32, i64, i32, i32, i32)

; Nanoseconds.
define i64 @tdx_now() alwaysinline {
  %now = call i64 asm sideeffect "mov.u64 $0, %globaltimer;", "=l"()
  ret i64 %now
}

define void @tdx_pause() alwaysinline {
  ret void
}

; Is %value non-zero in every thread of the program? One barrier; memory is ordered across it.
define i32 @tdx_all(i32 %value) alwaysinline {
  %all = call i32 asm sideeffect "{ .reg .pred mine, all; setp.ne.u32 mine, $1, 0; bar.red.and.pred all, 0, mine; selp.u32 $0, 1, 0, all; }", "=r,r,~{memory}"(i32 %value) convergent
  ret i32 %all
}

; The threads of the program wait for %count words at %base. The same result in all threads.
define i32 @tdx_wait_span(i64 %base, i32 %count, i32 %value, i32 %cmp, i64 %control, i32 %team,
                          i32 %peer, i32 %program) alwaysinline {
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %threads = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %mine = call i32 @tdx_spin_span(i32 %thread, i32 %threads, i32 %count, i64 %base, i32 %value,
                                  i32 %cmp, i64 %control, i32 %team, i32 %peer, i32 %program)
  %all = call i32 @tdx_all(i32 %mine)
  ret i32 %all
}

; 1 in thread 0 when %when holds and no fault stands, else 0. Before the barrier of a notify, so
; that the load overlaps with it.
define i32 @tdx_may_publish(i32 %when, i64 %control) alwaysinline {
entry:
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
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
  call void asm sideeffect "st.release.sys.global.b32 [$0], $1;", "l,r,~{memory}"(i64 %address, i32 %value)
  br label %done
done:
  ret i32 0
}

define i32 @tdx_publish_add(i64 %address, i32 %value, i32 %may) alwaysinline {
entry:
  %yes = icmp ne i32 %may, 0
  br i1 %yes, label %add, label %done
add:
  call void asm sideeffect "red.release.sys.global.add.u32 [$0], $1;", "l,r,~{memory}"(i64 %address, i32 %value)
  br label %done
done:
  ret i32 0
}

; Orders this thread's earlier accesses before its later ones for every observer.
define i32 @tdx_fence() alwaysinline {
  call void asm sideeffect "fence.acq_rel.sys;", "~{memory}"()
  ret i32 0
}

define i32 @tdx_fence_async_proxy() alwaysinline {
  call void asm sideeffect "fence.proxy.async;", "~{memory}"()
  ret i32 0
}

; 0, in a way that the compiler cannot see through.
define i32 @tdx_zero(i32 %token) alwaysinline {
  %zero = call i32 asm "mov.b32 $0, 0; // $1", "=r,r"(i32 %token)
  ret i32 %zero
}
