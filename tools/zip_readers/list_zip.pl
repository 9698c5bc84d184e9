# Reads paths from standard input, one a line, and prints a line of JSON for each: the "entries" as
# [name, size, CRC-32, SHA-256], or an "error". The argument is "list" or "extract".
use strict;
use warnings;
use Archive::Zip qw(:ERROR_CODES);
use Digest::SHA;
use JSON::PP;

Archive::Zip::setErrorHandler(sub { die @_ });

sub digest {
    my ($member) = @_;
    my $digest = Digest::SHA->new(256);
    my $status = $member->rewindData;
    while ($status == AZ_OK) {
        (my $piece, $status) = $member->readChunk;
        $digest->add($$piece);
    }
    die "status $status" if $status != AZ_STREAM_END;
    $member->endRead;
    return $digest->hexdigest;
}

sub entries {
    my ($path, $extracts) = @_;
    my $zip = Archive::Zip->new;
    my $status = $zip->read($path);
    die "status $status" if $status != AZ_OK;
    return [map {
        [$_->fileName, $_->uncompressedSize + 0, $_->crc32 + 0, $extracts ? digest($_) : undef]
    } $zip->members];
}

while (my $path = <STDIN>) {
    chomp $path;
    my $entries = eval { entries($path, $ARGV[0] eq "extract") };
    print encode_json($entries ? { entries => $entries } : { error => "$@" }), "\n";
}
