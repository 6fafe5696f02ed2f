; Records of Riegeli files, read and checked without Python's lock.
;
; LLVM's own language, because the package is pure Python: llvmlite makes machine code of it (_riegeli.py) for the
; vectors of the processor at hand. Nothing here writes outside of what the caller gave it, whatever a file holds.
;
; Formats: the Riegeli/records specification (doc/riegeli_records_file_format.md of google/riegeli) and ArrayRecord's
; cpp/layout.proto. Hash: HighwayHash-64 (Alakuijala, Cox and Wassenberg, 2016, arXiv:1612.06257).

; ---------------------------------------------------------------------------------------------------- HighwayHash-64

; v0, v1, mul0, mul1
%state = type { <4 x i64>, <4 x i64>, <4 x i64>, <4 x i64> }

declare i64 @pread(i32, ptr, i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.ctlz.i64(i64, i1)
declare <8 x i32> @llvm.fshl.v8i32(<8 x i32>, <8 x i32>, <8 x i32>)

; The hash's mixing of bytes: in each half of 16 bytes the places of well mixed ones are taken by others.
define internal <4 x i64> @zipper_merge(<4 x i64> %lanes) alwaysinline {
  %bytes = bitcast <4 x i64> %lanes to <32 x i8>
  %mixed = shufflevector <32 x i8> %bytes, <32 x i8> poison, <32 x i32> <
      i32 3, i32 12, i32 2, i32 5, i32 14, i32 1, i32 15, i32 0,
      i32 11, i32 4, i32 10, i32 13, i32 9, i32 6, i32 8, i32 7,
      i32 19, i32 28, i32 18, i32 21, i32 30, i32 17, i32 31, i32 16,
      i32 27, i32 20, i32 26, i32 29, i32 25, i32 22, i32 24, i32 23>
  %result = bitcast <32 x i8> %mixed to <4 x i64>
  ret <4 x i64> %result
}

define internal %state @update(%state %old, <4 x i64> %packet) alwaysinline {
  %v0 = extractvalue %state %old, 0
  %v1 = extractvalue %state %old, 1
  %mul0 = extractvalue %state %old, 2
  %mul1 = extractvalue %state %old, 3
  %input = add <4 x i64> %mul0, %packet
  %v1.a = add <4 x i64> %v1, %input
  %low1 = and <4 x i64> %v1.a, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %high0 = lshr <4 x i64> %v0, <i64 32, i64 32, i64 32, i64 32>
  %product0 = mul <4 x i64> %low1, %high0
  %mul0.a = xor <4 x i64> %mul0, %product0
  %v0.a = add <4 x i64> %v0, %mul1
  %low0 = and <4 x i64> %v0.a, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %high1 = lshr <4 x i64> %v1.a, <i64 32, i64 32, i64 32, i64 32>
  %product1 = mul <4 x i64> %low0, %high1
  %mul1.a = xor <4 x i64> %mul1, %product1
  %merged1 = call <4 x i64> @zipper_merge(<4 x i64> %v1.a)
  %v0.b = add <4 x i64> %v0.a, %merged1
  %merged0 = call <4 x i64> @zipper_merge(<4 x i64> %v0.b)
  %v1.b = add <4 x i64> %v1.a, %merged0
  %s0 = insertvalue %state poison, <4 x i64> %v0.b, 0
  %s1 = insertvalue %state %s0, <4 x i64> %v1.b, 1
  %s2 = insertvalue %state %s1, <4 x i64> %mul0.a, 2
  %s3 = insertvalue %state %s2, <4 x i64> %mul1.a, 3
  ret %state %s3
}

; One of the rounds at the end: v0 with its halves and words exchanged is the packet.
define internal %state @permute_and_update(%state %old) alwaysinline {
  %v0 = extractvalue %state %old, 0
  %words = bitcast <4 x i64> %v0 to <8 x i32>
  %permuted = shufflevector <8 x i32> %words, <8 x i32> poison,
      <8 x i32> <i32 5, i32 4, i32 7, i32 6, i32 1, i32 0, i32 3, i32 2>
  %packet = bitcast <8 x i32> %permuted to <4 x i64>
  %new = call %state @update(%state %old, <4 x i64> %packet)
  ret %state %new
}

; Hash of `size` bytes. `key`: the state that the key gives, 16 numbers of 64 bits, aligned to 32 bytes.
define i64 @highwayhash64(ptr %data, i64 %size, ptr %key) {
entry:
  %packet = alloca <4 x i64>, align 32
  %whole = and i64 %size, -32
  %rest = and i64 %size, 31
  %start = load %state, ptr %key, align 32
  br label %packets

packets:
  %at = phi i64 [ 0, %entry ], [ %next, %one.packet ]
  %state = phi %state [ %start, %entry ], [ %updated, %one.packet ]
  %more = icmp ult i64 %at, %whole
  br i1 %more, label %one.packet, label %tail

one.packet:
  %from = getelementptr i8, ptr %data, i64 %at
  %lanes = load <4 x i64>, ptr %from, align 1
  %updated = call %state @update(%state %state, <4 x i64> %lanes)
  %next = add i64 %at, 32
  br label %packets

tail:
  %even = icmp eq i64 %rest, 0
  br i1 %even, label %finish, label %partial

partial: ; fewer than 32 bytes are left: their number goes into v0 and turns v1, they fill the front of a packet
  %rest.32 = trunc i64 %rest to i32
  %single = insertelement <8 x i32> poison, i32 %rest.32, i32 0
  %turn = shufflevector <8 x i32> %single, <8 x i32> poison, <8 x i32> zeroinitializer
  %number = bitcast <8 x i32> %turn to <4 x i64>
  %v0 = extractvalue %state %state, 0
  %v0.a = add <4 x i64> %v0, %number
  %v1 = extractvalue %state %state, 1
  %v1.words = bitcast <4 x i64> %v1 to <8 x i32>
  %v1.turned = call <8 x i32> @llvm.fshl.v8i32(<8 x i32> %v1.words, <8 x i32> %v1.words, <8 x i32> %turn)
  %v1.a = bitcast <8 x i32> %v1.turned to <4 x i64>
  %state.0 = insertvalue %state %state, <4 x i64> %v0.a, 0
  %state.1 = insertvalue %state %state.0, <4 x i64> %v1.a, 1
  store <4 x i64> zeroinitializer, ptr %packet, align 32
  %left = getelementptr i8, ptr %data, i64 %whole
  %in.words = and i64 %rest, 28
  %odd = and i64 %rest, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %packet, ptr %left, i64 %in.words, i1 false)
  %last = getelementptr i8, ptr %left, i64 %in.words
  %half = and i64 %rest, 16
  %long = icmp ne i64 %half, 0
  br i1 %long, label %last.word, label %last.bytes

last.word: ; 16 or more: the last four bytes fill the packet's end, some of them for the second time
  %back = sub i64 %odd, 4
  %four = getelementptr i8, ptr %last, i64 %back
  %word = load i32, ptr %four, align 1
  %end = getelementptr i8, ptr %packet, i64 28
  store i32 %word, ptr %end, align 4
  br label %mix

last.bytes: ; else one to three bytes go to the 16th: the first, the middle and the last one
  %no.bytes = icmp eq i64 %odd, 0
  br i1 %no.bytes, label %mix, label %some.bytes

some.bytes:
  %middle = lshr i64 %odd, 1
  %final = sub i64 %odd, 1
  %middle.p = getelementptr i8, ptr %last, i64 %middle
  %final.p = getelementptr i8, ptr %last, i64 %final
  %byte.0 = load i8, ptr %last
  %byte.1 = load i8, ptr %middle.p
  %byte.2 = load i8, ptr %final.p
  %packet.16 = getelementptr i8, ptr %packet, i64 16
  %packet.17 = getelementptr i8, ptr %packet, i64 17
  %packet.18 = getelementptr i8, ptr %packet, i64 18
  store i8 %byte.0, ptr %packet.16
  store i8 %byte.1, ptr %packet.17
  store i8 %byte.2, ptr %packet.18
  br label %mix

mix:
  %padded = load <4 x i64>, ptr %packet, align 32
  %mixed = call %state @update(%state %state.1, <4 x i64> %padded)
  br label %finish

finish:
  %all = phi %state [ %state, %tail ], [ %mixed, %mix ]
  %round.1 = call %state @permute_and_update(%state %all)
  %round.2 = call %state @permute_and_update(%state %round.1)
  %round.3 = call %state @permute_and_update(%state %round.2)
  %round.4 = call %state @permute_and_update(%state %round.3)
  %end.v0 = extractvalue %state %round.4, 0
  %end.v1 = extractvalue %state %round.4, 1
  %end.mul0 = extractvalue %state %round.4, 2
  %end.mul1 = extractvalue %state %round.4, 3
  %sum.v = add <4 x i64> %end.v0, %end.v1
  %sum.mul = add <4 x i64> %end.mul0, %end.mul1
  %sum = add <4 x i64> %sum.v, %sum.mul
  %hash = extractelement <4 x i64> %sum, i64 0
  ret i64 %hash
}

; ------------------------------------------------------------------------------------------------------------ chunks

; Bytes in the file of a chunk with `size` bytes of header and data: one block header of 24 bytes for each multiple of
; 65,536 that it crosses or begins at.
define internal i64 @span_of(i64 %offset, i64 %size) alwaysinline {
  %before = add i64 %offset, 65511
  %in.block = and i64 %before, 65535
  %reach = add i64 %in.block, %size
  %blocks = udiv i64 %reach, 65512
  %headers = mul i64 %blocks, 24
  %span = add i64 %size, %headers
  ret i64 %span
}

; Takes the block headers out of what was read from `offset` on, in `span` bytes: what comes after one moves down over it.
; Returns the bytes that are left, or -1 where something ends within a header.
define internal i64 @join_blocks(ptr %chunk, i64 %offset, i64 %span) {
entry:
  %minus = sub i64 0, %offset
  %first = and i64 %minus, 65535
  %none = icmp uge i64 %first, %span
  br i1 %none, label %untouched, label %next

untouched:
  ret i64 %span

next:
  %header = phi i64 [ %first, %entry ], [ %next.header, %move ]
  %to = phi i64 [ %first, %entry ], [ %to.next, %move ]
  %inside = icmp ult i64 %header, %span
  br i1 %inside, label %piece, label %joined

piece:
  %from = add i64 %header, 24
  %next.header = add i64 %header, 65536
  %short = icmp ult i64 %next.header, %span
  %stop = select i1 %short, i64 %next.header, i64 %span
  %more = icmp ult i64 %from, %stop
  br i1 %more, label %move, label %refused

move:
  %length = sub i64 %stop, %from
  %source = getelementptr i8, ptr %chunk, i64 %from
  %target = getelementptr i8, ptr %chunk, i64 %to
  call void @llvm.memmove.p0.p0.i64(ptr %target, ptr %source, i64 %length, i1 false)
  %to.next = add i64 %to, %length
  br label %next

joined:
  ret i64 %to

refused:
  ret i64 -1
}

; Bytes of data of a chunk that was read from `offset` on, in `span` bytes, or -1 where it has not the right hashes. Header
; (40 bytes) and data lie side by side at `chunk` then.
define internal i64 @sound_data(ptr %chunk, i64 %offset, i64 %span, ptr %key) {
entry:
  %joined = call i64 @join_blocks(ptr %chunk, i64 %offset, i64 %span)
  %room = sub i64 %joined, 40
  %has.header = icmp sge i64 %room, 0
  br i1 %has.header, label %check.header, label %refused

check.header:
  %fields = getelementptr i8, ptr %chunk, i64 8
  %header.stored = load i64, ptr %chunk, align 1
  %header.found = call i64 @highwayhash64(ptr %fields, i64 32, ptr %key)
  %header.sound = icmp eq i64 %header.stored, %header.found
  %size = load i64, ptr %fields, align 1
  %size.sound = icmp ule i64 %size, %room
  %sound.header = and i1 %header.sound, %size.sound
  br i1 %sound.header, label %check.data, label %refused

check.data:
  %data = getelementptr i8, ptr %chunk, i64 40
  %hash.p = getelementptr i8, ptr %chunk, i64 16
  %data.stored = load i64, ptr %hash.p, align 1
  %data.found = call i64 @highwayhash64(ptr %data, i64 %size, ptr %key)
  %data.sound = icmp eq i64 %data.stored, %data.found
  br i1 %data.sound, label %sound, label %refused

sound:
  ret i64 %size

refused:
  ret i64 -1
}

; Reads the chunk at `offset` and checks it. `chunk` has room for span_of(offset, 40 + data_size) bytes.
define zeroext i1 @read_chunk(i32 %file, i64 %offset, i64 %data_size, ptr %chunk, ptr %key) {
  %size = add i64 %data_size, 40
  %span = call i64 @span_of(i64 %offset, i64 %size)
  %got = call i64 @pread(i32 %file, ptr %chunk, i64 %span, i64 %offset)
  %full = icmp eq i64 %got, %span
  br i1 %full, label %check, label %refused

check:
  %found = call i64 @sound_data(ptr %chunk, i64 %offset, i64 %span, ptr %key)
  %sound = icmp eq i64 %found, %data_size
  ret i1 %sound

refused:
  ret i1 false
}

; ----------------------------------------------------------------------------------------------------------- records

; Reads a varint of `bytes` from `at` on; its end is `stop` + 1 where there is none.
define internal { i64, i64 } @varint_at(ptr %bytes, i64 %at, i64 %stop) alwaysinline {
entry:
  br label %next

next:
  %place = phi i64 [ %at, %entry ], [ %place.next, %more ]
  %value = phi i64 [ 0, %entry ], [ %value.next, %more ]
  %shift = phi i64 [ 0, %entry ], [ %shift.next, %more ]
  %inside = icmp ult i64 %place, %stop
  %short = icmp ult i64 %shift, 63
  %go = and i1 %inside, %short
  br i1 %go, label %more, label %none

more:
  %byte.p = getelementptr i8, ptr %bytes, i64 %place
  %byte = load i8, ptr %byte.p
  %byte.64 = zext i8 %byte to i64
  %low = and i64 %byte.64, 127
  %moved = shl i64 %low, %shift
  %value.next = or i64 %value, %moved
  %place.next = add i64 %place, 1
  %shift.next = add i64 %shift, 7
  %last = icmp ult i8 %byte, 128
  br i1 %last, label %done, label %next

done:
  %with.value = insertvalue { i64, i64 } poison, i64 %value.next, 0
  %both = insertvalue { i64, i64 } %with.value, i64 %place.next, 1
  ret { i64, i64 } %both

none:
  %beyond = add i64 %stop, 1
  %no.value = insertvalue { i64, i64 } poison, i64 0, 0
  %neither = insertvalue { i64, i64 } %no.value, i64 %beyond, 1
  ret { i64, i64 } %neither
}

; Bytes of a record: from the list, or `width` where there is none.
define internal i64 @size_of(ptr %sizes, i64 %width, i64 %row) alwaysinline {
  %same = icmp eq ptr %sizes, null
  br i1 %same, label %one.size, label %own.size

one.size:
  ret i64 %width

own.size:
  %size.p = getelementptr i64, ptr %sizes, i64 %row
  %size = load i64, ptr %size.p
  ret i64 %size
}

; Bytes that the chunk of a record takes in the file. A compressed one reaches to the next. Of one that is not, the length
; is known, and what comes after it need not be read: header, 0 for no compression, bytes of the list of sizes, that list of
; one varint, the record.
define internal i64 @span_of_row(ptr %offsets, i64 %row, i64 %offset, i64 %size, ptr %inflate) alwaysinline {
  %plain = icmp eq ptr %inflate, null
  br i1 %plain, label %known, label %to.next

known:
  %not.zero = or i64 %size, 1
  %zeros = call i64 @llvm.ctlz.i64(i64 %not.zero, i1 true)
  %bits = sub i64 70, %zeros
  %varint = udiv i64 %bits, 7
  %before = add i64 %varint, 42
  %chunk = add i64 %before, %size
  %span = call i64 @span_of(i64 %offset, i64 %chunk)
  ret i64 %span

to.next:
  %next = add i64 %row, 1
  %next.p = getelementptr i64, ptr %offsets, i64 %next
  %next.offset = load i64, ptr %next.p
  %reach = sub i64 %next.offset, %offset
  ret i64 %reach
}

; Puts the record of a sound chunk into `target`. False where it is not one record of `size` bytes, stored in a way that is
; known here.
define internal i1 @take_record(ptr %chunk, i64 %data_size, i64 %size, ptr %target, ptr %inflate, ptr %context) {
entry:
  %kind.p = getelementptr i8, ptr %chunk, i64 24
  %kind = load i64, ptr %kind.p, align 1
  %is.simple = icmp eq i64 %kind, 370 ; 'r', and one record in the seven bytes above
  %decoded.p = getelementptr i8, ptr %chunk, i64 32
  %decoded = load i64, ptr %decoded.p, align 1
  %is.decoded = icmp eq i64 %decoded, %size
  %has.data = icmp ne i64 %data_size, 0
  %good.1 = and i1 %is.simple, %is.decoded
  %good = and i1 %good.1, %has.data
  br i1 %good, label %list, label %refused

list: ; the sizes of all records; of one it is known
  %data = getelementptr i8, ptr %chunk, i64 40
  %compression = load i8, ptr %data
  %list.both = call { i64, i64 } @varint_at(ptr %data, i64 1, i64 %data_size)
  %list.size = extractvalue { i64, i64 } %list.both, 0
  %list.at = extractvalue { i64, i64 } %list.both, 1
  %list.room = sub i64 %data_size, %list.at
  %list.there = icmp sge i64 %list.room, 0
  %list.fits = icmp ule i64 %list.size, %list.room
  %list.good = and i1 %list.there, %list.fits
  br i1 %list.good, label %values, label %refused

values:
  %at = add i64 %list.at, %list.size
  %left = sub i64 %data_size, %at
  %is.plain = icmp eq i8 %compression, 0
  br i1 %is.plain, label %plain, label %compressed

plain:
  %is.whole = icmp eq i64 %left, %size
  br i1 %is.whole, label %copy, label %refused

copy:
  %record = getelementptr i8, ptr %data, i64 %at
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %record, i64 %size, i1 false)
  ret i1 true

compressed: ; the size of what comes out, then the frame
  %is.zstd = icmp eq i8 %compression, 122
  %can.inflate = icmp ne ptr %inflate, null
  %go = and i1 %is.zstd, %can.inflate
  br i1 %go, label %frame, label %refused

frame:
  %frame.both = call { i64, i64 } @varint_at(ptr %data, i64 %at, i64 %data_size)
  %frame.decoded = extractvalue { i64, i64 } %frame.both, 0
  %frame.at = extractvalue { i64, i64 } %frame.both, 1
  %frame.size = sub i64 %data_size, %frame.at
  %frame.there = icmp sge i64 %frame.size, 0
  %frame.fits = icmp eq i64 %frame.decoded, %size
  %frame.good = and i1 %frame.there, %frame.fits
  br i1 %frame.good, label %decompress, label %refused

decompress:
  %frame.p = getelementptr i8, ptr %data, i64 %frame.at
  %made = call i64 %inflate(ptr %context, ptr %target, i64 %size, ptr %frame.p, i64 %frame.size)
  %is.made = icmp eq i64 %made, %size
  ret i1 %is.made

refused:
  ret i1 false
}

; Reads rows of a file that has one record a chunk.
;
;   rows      i64[count], numbers of chunks
;   chunks    how many the file has: a row beyond them is refused
;   offsets   i64[chunks + 1], where they begin, and where the last one ends
;   sizes     i64[chunks], bytes of their records; null where all have `width`
;   width     bytes that each record must have, or 0 for any
;   places    i64[count], where in `out` the records go
;   scratch   room for the longest chunk with its block headers, and for `together` bytes
;   together  neighbours are read by one call of the system up to so many bytes: a call costs as much as some kilobytes
;   inflate   ZSTD_decompressDCtx, or null where the file is not compressed
;   context   for it
;
; Returns how many were read: fewer than `count` where one is not what was expected. What it is, damaged or of another
; layout, the caller finds out by the library.
define i64 @read_records(i32 %file, i64 %count, ptr %rows, i64 %chunks, ptr %offsets, ptr %sizes, i64 %width,
                         ptr %places, ptr %out, ptr %scratch, i64 %together, ptr %inflate, ptr %context, ptr %key) {
entry:
  br label %next.group

next.group:
  %i = phi i64 [ 0, %entry ], [ %j, %next.record ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %group, label %stop.group

group: ; the first record, and those that follow it in the file and are wanted next
  %row.p = getelementptr i64, ptr %rows, i64 %i
  %row = load i64, ptr %row.p
  %exists = icmp ult i64 %row, %chunks
  br i1 %exists, label %first, label %stop.group

first:
  %offset.p = getelementptr i64, ptr %offsets, i64 %row
  %offset = load i64, ptr %offset.p
  %size = call i64 @size_of(ptr %sizes, i64 %width, i64 %row)
  %span = call i64 @span_of_row(ptr %offsets, i64 %row, i64 %offset, i64 %size, ptr %inflate)
  %end.first = add i64 %offset, %span
  br label %follower

follower:
  %before = phi i64 [ %i, %first ], [ %j.try, %accepted ]
  %last.row = phi i64 [ %row, %first ], [ %row.next, %accepted ]
  %end = phi i64 [ %end.first, %first ], [ %end.next, %accepted ]
  %j.try = add i64 %before, 1
  %is.there = icmp ult i64 %j.try, %count
  br i1 %is.there, label %is.neighbour, label %read

is.neighbour:
  %wanted = add i64 %last.row, 1
  %row.next.p = getelementptr i64, ptr %rows, i64 %j.try
  %row.next = load i64, ptr %row.next.p
  %same = icmp eq i64 %row.next, %wanted
  %next.exists = icmp ult i64 %row.next, %chunks
  %neighbour = and i1 %same, %next.exists
  br i1 %neighbour, label %fits, label %read

fits:
  %offset.next.p = getelementptr i64, ptr %offsets, i64 %row.next
  %offset.next = load i64, ptr %offset.next.p
  %size.next = call i64 @size_of(ptr %sizes, i64 %width, i64 %row.next)
  %span.next = call i64 @span_of_row(ptr %offsets, i64 %row.next, i64 %offset.next, i64 %size.next, ptr %inflate)
  %end.next = add i64 %offset.next, %span.next
  %length.next = sub i64 %end.next, %offset
  %apart = icmp uge i64 %offset.next, %end
  %room = icmp ule i64 %length.next, %together
  %good = and i1 %apart, %room
  br i1 %good, label %accepted, label %read

accepted:
  br label %follower

read:
  %j = phi i64 [ %j.try, %follower ], [ %j.try, %is.neighbour ], [ %j.try, %fits ]
  %length = sub i64 %end, %offset
  %got = call i64 @pread(i32 %file, ptr %scratch, i64 %length, i64 %offset)
  %full = icmp eq i64 %got, %length
  br i1 %full, label %next.record, label %stop.group

next.record:
  %k = phi i64 [ %i, %read ], [ %k.next, %found ]
  %k.row = phi i64 [ %row, %read ], [ %k.row.next, %found ]
  %in.group = icmp ult i64 %k, %j
  br i1 %in.group, label %record, label %next.group

record:
  %k.offset.p = getelementptr i64, ptr %offsets, i64 %k.row
  %k.offset = load i64, ptr %k.offset.p
  %k.size = call i64 @size_of(ptr %sizes, i64 %width, i64 %k.row)
  %any = icmp eq i64 %width, 0
  %right = icmp eq i64 %k.size, %width
  %k.wanted = or i1 %any, %right
  br i1 %k.wanted, label %check, label %stop.record

check:
  %k.span = call i64 @span_of_row(ptr %offsets, i64 %k.row, i64 %k.offset, i64 %k.size, ptr %inflate)
  %k.at = sub i64 %k.offset, %offset
  %k.chunk = getelementptr i8, ptr %scratch, i64 %k.at
  %k.data.size = call i64 @sound_data(ptr %k.chunk, i64 %k.offset, i64 %k.span, ptr %key)
  %sound = icmp sge i64 %k.data.size, 0
  br i1 %sound, label %take, label %stop.record

take:
  %place.p = getelementptr i64, ptr %places, i64 %k
  %place = load i64, ptr %place.p
  %target = getelementptr i8, ptr %out, i64 %place
  %taken = call i1 @take_record(ptr %k.chunk, i64 %k.data.size, i64 %k.size, ptr %target, ptr %inflate, ptr %context)
  br i1 %taken, label %found, label %stop.record

found:
  %k.next = add i64 %k, 1
  %k.row.next = add i64 %k.row, 1
  br label %next.record

stop.group:
  ret i64 %i

stop.record:
  ret i64 %k
}

; ------------------------------------------------------------------------------------------------------------ footer

; Reads `count` varints of `bytes` into `values`. Returns where they end, or `stop` + 1 where there are fewer.
define i64 @read_varints(ptr %bytes, i64 %stop, i64 %count, ptr %values) {
entry:
  br label %next

next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %one ]
  %at = phi i64 [ 0, %entry ], [ %at.next, %one ]
  %left = icmp ult i64 %i, %count
  %inside = icmp ult i64 %at, %stop
  %go = and i1 %left, %inside
  br i1 %go, label %one, label %ended

one:
  %both = call { i64, i64 } @varint_at(ptr %bytes, i64 %at, i64 %stop)
  %value = extractvalue { i64, i64 } %both, 0
  %at.next = extractvalue { i64, i64 } %both, 1
  %value.p = getelementptr i64, ptr %values, i64 %i
  store i64 %value, ptr %value.p
  %i.next = add i64 %i, 1
  br label %next

ended:
  %beyond = add i64 %stop, 1
  %end = select i1 %left, i64 %beyond, i64 %at
  ret i64 %end
}
