; Device library of tdx.language for AMD GPUs (gfx942, gfx950); links after tdx_common.
target triple = "amdgcn-amd-amdhsa"

declare i32 @llvm.amdgcn.workitem.id.x()
declare i64 @llvm.amdgcn.s.memrealtime()
declare void @llvm.amdgcn.s.sleep(i32)
declare i64 @tdx_fault(i64)

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
  %word = inttoptr i64 %address to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %word release, align 4
  br label %done
done:
  ret i32 0
}

define i32 @tdx_publish_add(i64 %address, i32 %value, i32 %may) alwaysinline {
entry:
  %yes = icmp ne i32 %may, 0
  br i1 %yes, label %add, label %done
add:
  %word = inttoptr i64 %address to ptr addrspace(1)
  %old = atomicrmw add ptr addrspace(1) %word, i32 %value release
  br label %done
done:
  ret i32 0
}

; Orders this thread's earlier accesses before its later ones for every observer.
define i32 @tdx_fence() alwaysinline {
  fence acq_rel
  ret i32 0
}

; 0, in a way that the compiler cannot see through.
define i32 @tdx_zero(i32 %token) alwaysinline {
  %zero = call i32 asm "s_mov_b32 $0, 0 ; $1", "=s,v"(i32 %token)
  ret i32 %zero
}
