"""Operations that the device lacks or does badly, written in other ones."""
